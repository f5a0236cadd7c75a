-- Registers the caller's reply stream for jobs, or answers at once where there is no need.
--
-- KEYS  the caller's reply stream
-- ARGV  job key prefix, result key prefix, waiters key prefix, ms that a set of waiters lives;
--       then the ids
-- Returns for each id its result record, or 1 where the stream will hear of it, or 0 where
--       neither the job nor its result exists.
local job_prefix, result_prefix, waiters_prefix = ARGV[1], ARGV[2], ARGV[3]
local waiters_ttl_ms = ARGV[4]
local stream, first = KEYS[1], 5
local answers = {}

for at = first, #ARGV do
  local id = ARGV[at]
  local job_key = job_prefix .. id
  local answer = redis.call('GET', result_prefix .. id)
  if not answer then
    answer = redis.call('EXISTS', job_key)
    -- A record ends with the reply stream of whoever enqueued it: that one hears anyway.
    if answer == 1 and redis.call('GETRANGE', job_key, -#stream, -1) ~= stream then
      redis.call('SADD', waiters_prefix .. id, stream)
      redis.call('PEXPIRE', waiters_prefix .. id, waiters_ttl_ms)
    end
  end
  answers[at - first + 1] = answer
end
return answers
