-- Writes results, each once. KEYS: queue, leases.
-- ARGV: result_ttl_ms, reply_ttl_ms, the key prefixes job, in-progress, retry, result, waiters,
-- then id, token, result, reply stream ('' for none), …
-- Returns 1 for each job whose result was written, 0 where a second finisher was refused.
local queue, leases = KEYS[1], KEYS[2]
local result_ttl, reply_ttl = ARGV[1], ARGV[2]
local job, in_progress, retry, result, waiters = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local written = {}
for i = 8, #ARGV, 4 do
  local id, token, record, reply = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local owner = redis.call('GET', in_progress .. id)
  local open = redis.call('ZSCORE', queue, id) and redis.call('EXISTS', result .. id) == 0
  if open and (owner == token or not owner) then
    redis.call('SET', result .. id, record, 'PX', result_ttl)
    redis.call('ZREM', queue, id)
    redis.call('ZREM', leases, id)
    redis.call('DEL', in_progress .. id, retry .. id, job .. id)
    local streams = redis.call('SMEMBERS', waiters .. id)
    redis.call('DEL', waiters .. id)
    if reply ~= '' then streams[#streams + 1] = reply end
    for _, stream in ipairs(streams) do
      -- A key of another type must not keep the result from being written.
      redis.pcall('XADD', stream, '*', 'id', id)
      redis.pcall('PEXPIRE', stream, reply_ttl)
    end
    written[#written + 1] = 1
  else
    written[#written + 1] = 0
  end
end
return written
