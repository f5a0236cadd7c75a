-- Adds to the progress of running jobs. KEYS: queue.
-- ARGV: for each job id, token, number of pieces that the caller knows of (0 begins anew), piece.
-- Returns 1 for each job whose piece was added, 0 where the caller does not hold the job, or it has
-- other pieces than the caller knows of.
local added = {}
for i = 1, #ARGV, 4 do
  local id, token, known, piece = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  added[#added + 1] = holds(id, token) and add_progress(id, known, piece) and 1 or 0
end
return added
