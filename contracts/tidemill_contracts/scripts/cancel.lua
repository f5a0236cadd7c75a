-- Ends jobs that nobody wants any more, wherever they are. KEYS: queue.
-- ARGV: ms that a result is kept, then for each job id, result.
-- Returns for each: 1 cancelled, 2 cancelled while it ran (its worker is told), 3 it had ended
-- already, 4 a stock arq worker runs it (nothing was done), 0 there is no such job.
begin_writing()
local answers = {}
for i = 2, #ARGV, 2 do
  local id, record = ARGV[i], ARGV[i + 1]
  local answer = 0
  if redis.call('EXISTS', RESULT_PREFIX .. id) == 1 then
    answer = 3
  elseif redis.call('GET', IN_PROGRESS_PREFIX .. id) == '1' then
    answer = 4
  elseif redis.call('ZSCORE', queue, id) then
    answer = 1
    local holder = redis.call('HGET', holders, id)
    if holder and redis.call('ZSCORE', leases, id) then
      answer = 2
      local orders = queue .. ':orders:' .. string.match(holder, '^%S+ (%S+)')
      redis.call('LPUSH', orders, id)
      redis.call('PEXPIRE', orders, 60000)
    end
    redis.call('ZREM', suspects, id)
    redis.call('HDEL', later, id)
    leave_lanes(id)
    local reply = reply_of(JOB_PREFIX .. id)
    end_jobs({ { id = id, record = record, ttl_ms = ARGV[1], reply = reply } })
  end
  answers[#answers + 1] = answer
end
settle_load()
return answers
