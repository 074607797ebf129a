#include "trainer/run/training_run.h"

#include <numeric>
#include <string>

#include "distckpt/base/error.h"
#include "models/distributed/messages.h"
#include "models/distributed/world.h"
#include "trainer/run/all_ranks.h"

namespace ferry::trainer {

RunLength run_length(const TrainerConfig& run,
                     const Frequency& saving,
                     std::string_view batch_key,
                     int batch_size,
                     const std::function<ParsedRows()>& count) {
  const bool counts_epochs = saving.after_each_epoch || run.test_freq.after_each_epoch;
  if (run.total_training_steps && !counts_epochs) return {.steps = *run.total_training_steps};
  const auto rows = count();
  const auto of_epoch = rows.count / batch_size;
  if (of_epoch > 0)
    return {.steps = run.total_training_steps.value_or(of_epoch * run.total_epochs),
            .steps_per_epoch = of_epoch};
  throw Error(
      ErrorKind::kUsage,
      fmt::format("data.train_files: {} records that are neither malformed nor filtered are less "
                  "than one batch of {} ({})",
                  rows.count, batch_size, batch_key),
      rows.malformed ? fmt::format("the first malformed one is {}", rows.malformed->describe())
                     : "");
}

ParsedRows count_together(models::World& world,
                          const std::function<ParsedRows(int rank, int num_ranks)>& count) {
  auto rows = count(world.rank(), world.size());
  const auto counts = models::gather(all_ranks(world, "records"), rows.count);
  rows.count = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  return rows;
}

void NotFiniteSteps::add(const std::string& not_finite, bool may_recover) {
  constexpr int kMost = 10;
  in_a_row_ = not_finite.empty() ? 0 : in_a_row_ + 1;
  require(in_a_row_ < kMost || may_recover, ErrorKind::kCorrupt,
          "{}: no finite gradient in {} steps in a row", not_finite, in_a_row_);
}

}  // namespace ferry::trainer
