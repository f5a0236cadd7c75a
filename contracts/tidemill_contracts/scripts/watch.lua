-- Registers the caller's reply stream for jobs, or answers at once where there is no need.
--
-- KEYS  queue
-- ARGV  the caller's reply stream; then the ids
-- Returns for each id its result record, or 1 where the stream will hear of it, or 0 where
--       neither the job nor its result exists.
begin_writing()
local stream = ARGV[1]
local answers = {}

for at = 2, #ARGV do
  local id = ARGV[at]
  local answer = redis.call('GET', RESULT_PREFIX .. id)
  if not answer then
    answer = redis.call('EXISTS', JOB_PREFIX .. id)
    -- The reply stream of whoever enqueued the job hears anyway.
    if answer == 1 and reply_of(JOB_PREFIX .. id) ~= stream then
      redis.call('SADD', WAITERS_PREFIX .. id, stream)
      redis.call('PEXPIRE', WAITERS_PREFIX .. id, WAITERS_TTL_MS)
    end
  end
  answers[at - 1] = answer
end
return answers
