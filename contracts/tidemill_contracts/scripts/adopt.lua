-- The jobs of a claim whose answer was lost: returns what that answer said of those that it
-- leased and that nobody has taken since. No try is spent on them again.
-- KEYS: queue. ARGV: lease_ms, the claim's token, most bytes of one job.
-- Returns as a claim does. Handed back, the jobs go to the front; one that was tried before counts
-- as a suspect. Looks at every lease of the queue, which is seldom needed.
begin_writing()
local lease_ms, token, max_job_bytes = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local reply = { now_ms, -1, 0 }
for _, id in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
  if redis.call('GET', IN_PROGRESS_PREFIX .. id) == token then
    renew_lease(id, token, lease_ms)
    local tries = tonumber(redis.call('GET', RETRY_PREFIX .. id) or 1)
    tell(reply, id, '1', tries, tries > 1 and 1 or 0, max_job_bytes)
  end
end
return reply
