-- Forgets dead jobs. KEYS: queue. ARGV: ids. Returns how many there were.
local dropped = 0
for _, id in ipairs(ARGV) do
  redis.call('ZREM', dead, id)
  dropped = dropped + redis.call('DEL', DEAD_PREFIX .. id)
  redis.call('DEL', DEAD_HISTORY_PREFIX .. id)
end
return dropped
