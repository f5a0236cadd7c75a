-- Hands claimed jobs back. KEYS: queue, leases, doorbell.
-- ARGV: in-progress and retry prefix, then id, token, score, delay_ms, refund, …
-- With a delay the job is due that much later; without one it takes its old score again.
-- refund 1 gives the try back. Jobs that no longer belong to the caller are left alone.
local queue, leases, doorbell = KEYS[1], KEYS[2], KEYS[3]
local in_progress, retry = ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local released = 0
for i = 3, #ARGV, 5 do
  local id, token, score, delay, refund = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  if redis.call('GET', in_progress .. id) == token then
    if tonumber(delay) > 0 then score = now + delay end
    redis.call('ZADD', queue, 'XX', score, id)
    redis.call('ZREM', leases, id)
    redis.call('DEL', in_progress .. id)
    if refund == '1' and tonumber(redis.call('GET', retry .. id) or '0') > 0 then
      redis.call('DECR', retry .. id)
    end
    released = released + 1
  end
end
if released > 0 and redis.call('LLEN', doorbell) == 0 then redis.call('LPUSH', doorbell, '1') end
return released
