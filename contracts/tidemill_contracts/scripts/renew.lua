-- Renews leases. KEYS: queue. ARGV: lease_ms, then id, token, …
-- Returns the ids that now belong to somebody else or have ended.
begin_writing()
local lease_ms = tonumber(ARGV[1])
local lost = {}
for i = 2, #ARGV, 2 do
  local id, token = ARGV[i], ARGV[i + 1]
  local mine, late = holds(id, token)
  if mine then
    -- A lease that ran out while nobody else was there to claim the job is taken up again, and
    -- its worker has not died after all.
    if late and redis.call('ZREM', suspects, id) == 1 then redis.call('RPOP', HISTORY_PREFIX .. id) end
    renew_lease(id, token, lease_ms)
  else
    lost[#lost + 1] = id
  end
end
return lost
