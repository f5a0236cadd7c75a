-- Writes jobs and queues them, each id once; rings the doorbell where anything was queued. Stops
-- at the first job that it refuses.
--
-- KEYS  queue
-- ARGV  the caller's reply stream; then for each job: id, record, priority, when it is due ('' now,
--       '+' and ms from now, or ms since 1970), tenant
-- Returns one number a job:
--       1 queued, 2 its result exists already, 3 a job of that id exists (the caller now waits
--       for it as well), 4 as 3 and the caller itself had enqueued it;
--       refused: 5 a job of that id has another content, 6 the queue has too many jobs, 7 too
--       many bytes, 8 too many jobs of this tenant
local stream = ARGV[1]
local first, width = 2, 5
local limits = redis.call('HMGET', queue .. ':limits', 'jobs', 'bytes', 'tenant_jobs')
local max_jobs = tonumber(limits[1]) or math.huge
local max_bytes = tonumber(limits[2]) or math.huge
local max_tenant_jobs = tonumber(limits[3]) or math.huge
local jobs = redis.call('ZCARD', queue)
local bytes = tonumber(redis.call('HGET', load, 'bytes') or 0)

-- In microseconds, and by quarters of one within a call (a double holds no finer): first come,
-- first served. 2 ms early: due at once for a claim that counts whole ms.
local arrival = now_us / 1000 - 2
local queued, added = 0, 0
local answers = {}

local function known(id, record, key)
  local content = content_of(key)
  return not content or content == string.sub(record, -32)
end

-- Where none of the ids is known, as a rule, nothing needs to be asked for each of them.
local asked = {}
for at = first, #ARGV, width do
  asked[#asked + 1], asked[#asked + 2] = JOB_PREFIX .. ARGV[at], RESULT_PREFIX .. ARGV[at]
end
local all_new = redis.call('EXISTS', unpack(asked)) == 0

-- What goes into Redis together at the end: records, and scores in arq's set.
local records, scores, mine = {}, {}, {}

local function write()
  if #records > 0 then redis.call('MSET', unpack(records)) end
  if #scores > 0 then redis.call('ZADD', queue, unpack(scores)) end
  records, scores = {}, {}
end

local function enqueue(id, record, priority, due, tenant, nth)
  local job_key = JOB_PREFIX .. id
  if mine[id] then write() end
  local is_new = all_new and not mine[id]
  if not is_new and redis.call('EXISTS', job_key) == 1 then
    if not known(id, record, job_key) then return 5 end
    if reply_of(job_key) == stream then return 4 end
    redis.call('SADD', WAITERS_PREFIX .. id, stream)
    redis.call('PEXPIRE', WAITERS_PREFIX .. id, WAITERS_TTL_MS)
    return 3
  end
  if not is_new and redis.call('EXISTS', RESULT_PREFIX .. id) == 1 then
    return known(id, record, RESULT_PREFIX .. id) and 2 or 5
  end
  if jobs + queued >= max_jobs then return 6 end
  if bytes + added + #record > max_bytes then return 7 end
  if tenant ~= '' then
    if tonumber(redis.call('HGET', load, '=' .. tenant) or 0) >= max_tenant_jobs then return 8 end
    redis.call('HINCRBY', load, '=' .. tenant, 1)
    redis.call('HSET', tenants, id, tenant)
  end
  records[#records + 1], records[#records + 2] = job_key, record
  mine[id] = true
  if due == '' and tenant == '' and priority >= 0 then
    scores[#scores + 1], scores[#scores + 2] = place_of(priority, arrival + nth / 4096), id
  elseif due == '' then
    place(id, priority, tenant, arrival + nth / 4096, nth)
  else
    redis.call('ZADD', queue, string.sub(due, 1, 1) == '+' and now_ms + due or due, id)
    if tenant ~= '' or priority ~= 0 then
      redis.call('HSET', later, id, priority .. ' ' .. tenant)
    end
  end
  queued, added = queued + 1, added + #record
  return 1
end

for at = first, #ARGV, width do
  local nth = (at - first) / width
  local priority = tonumber(ARGV[at + 2])
  local answer = enqueue(ARGV[at], ARGV[at + 1], priority, ARGV[at + 3], ARGV[at + 4], nth)
  answers[nth + 1] = answer
  if answer > 4 then break end
end
write()
if queued > 0 then
  redis.call('HINCRBY', load, 'bytes', added)
  ring()
end
return answers
