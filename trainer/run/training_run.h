// Parts that the loops of all runs make of their configuration: records and steps.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "trainer/config/run_sections.h"
#include "trainer/data/record_stream.h"

namespace ferry::models {
class World;
}

namespace ferry::trainer {

// The records of a data section: to train on, or, in the order of the files and to their end, to
// validate on. Throws Error as RecordStream does.
template <typename Data>
RecordStream open_records(const Data& data, const TrainerConfig& run, bool training) {
  const auto& files = training ? data.train_files : data.val_files;
  return RecordStream({files.begin(), files.end()},
                      {.order = {.shuffle = training && data.shuffle,
                                 .seed = static_cast<std::uint64_t>(run.seed),
                                 .shuffle_buffer_bytes = data.shuffle_buffer_bytes},
                       .on_malformed = data.malformed_rows,
                       .drop_last = training});
}

// The records to train on. Tries `parse` on the first of them, and of those to validate on, so that
// data which the run cannot use are refused before its first step.
template <typename Data, typename Parse>
RecordStream open_training_records(const Data& data, const TrainerConfig& run, const Parse& parse) {
  if (!data.val_files.empty()) open_records(data, run, /*training=*/false).try_first(parse);
  auto records = open_records(data, run, /*training=*/true);
  records.try_first(parse);
  return records;
}

struct RunLength {
  std::int64_t steps = 0;
  std::int64_t steps_per_epoch = 0;  // 0: it was not counted
};

// Steps of the run: those that were asked for, or as many whole batches as the epochs have of
// records that are neither malformed nor filtered, which `count` tells; it is asked where something
// is due behind each epoch, too. Throws Error(kUsage), naming the key of the batch size, and the
// first malformed record, if there is not one.
RunLength run_length(const TrainerConfig& run,
                     const Frequency& saving,
                     std::string_view batch_key,
                     int batch_size,
                     const std::function<ParsedRows()>& count);

// The sum of what `count` says of each rank's share, with the first malformed row of this rank's.
// Called by all ranks.
ParsedRows count_together(models::World& world,
                          const std::function<ParsedRows(int rank, int num_ranks)>& count);

// Records of an epoch that `parse` makes something of. Called by all ranks, which share the
// reading.
template <typename Parse>
ParsedRows count_records(models::World& world, const RecordStream& stream, const Parse& parse) {
  return count_together(
      world, [&](int rank, int num_ranks) { return stream.count_parsed(parse, rank, num_ranks); });
}

// Steps in a row without a finite gradient.
class NotFiniteSteps {
 public:
  // Takes the parameter of a step whose gradient is not finite, "" if all are. Throws
  // Error(kCorrupt) for the tenth in a row, unless `may_recover`: a loss scale is still on its way
  // down.
  void add(const std::string& not_finite, bool may_recover = false);

 private:
  int in_a_row_ = 0;
};

}  // namespace ferry::trainer
