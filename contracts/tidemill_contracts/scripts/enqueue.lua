-- Writes jobs and queues them, each id once; rings the doorbell where anything was queued.
--
-- KEYS  queue, doorbell
-- ARGV  job key prefix, result key prefix, waiters key prefix, the caller's reply stream,
--       ms that a set of waiters lives; then for each job: id, record, head start in ms
-- Returns one number a job:
--       1 queued, 2 its result exists already, 3 a job of that id exists (the caller now waits
--       for it as well), 4 as 3 and the caller itself had enqueued it
local job_prefix, result_prefix, waiters_prefix = ARGV[1], ARGV[2], ARGV[3]
local stream, waiters_ttl_ms = ARGV[4], ARGV[5]
local first, width = 6, 3

-- In microseconds, and by quarters of one within a call (a double holds no finer): first come,
-- first served. 2 ms early: due at once for a claim that counts whole ms.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000 - 2
local jobs = (#ARGV - first + 1) / width
local queued = 0
local answers = {}

for n = 1, jobs do
  local at = first + (n - 1) * width
  local id, record, head_start_ms = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local job_key = job_prefix .. id
  if redis.call('EXISTS', job_key) == 1 then
    -- A record ends with the reply stream of whoever enqueued it.
    if redis.call('GETRANGE', job_key, -#stream, -1) == stream then
      answers[n] = 4
    else
      redis.call('SADD', waiters_prefix .. id, stream)
      redis.call('PEXPIRE', waiters_prefix .. id, waiters_ttl_ms)
      answers[n] = 3
    end
  elseif redis.call('EXISTS', result_prefix .. id) == 1 then
    answers[n] = 2
  else
    redis.call('SET', job_key, record)
    redis.call('ZADD', KEYS[1], now_ms - head_start_ms + (n - 1) / 4096, id)
    queued = queued + 1
    answers[n] = 1
  end
end

if queued > 0 and redis.call('LLEN', KEYS[2]) == 0 then
  redis.call('LPUSH', KEYS[2], '1')
end
return answers
