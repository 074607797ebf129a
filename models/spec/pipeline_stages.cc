#include "models/spec/pipeline_stages.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::models {
namespace {

constexpr std::string_view kFlag = "--pipeline-model-parallel-layout";
constexpr std::size_t kMaxLength = 1 << 20;  // of a layout written out

std::vector<int> divisors(int number) {
  std::vector<int> found;
  for (int i = 1; i <= number; ++i)
    if (number % i == 0) found.push_back(i);
  return found;
}

// "(tt|)*3,t*2" -> "tt|tt|tt|tt".
std::string write_out(std::string_view text) {
  std::string written;
  std::size_t at = 0;
  while (at < text.size()) {
    if (text[at] == ',') {
      ++at;
      continue;
    }
    std::string unit(1, text[at++]);
    if (unit == "(") {
      const auto close = text.find(')', at);
      require(close != std::string_view::npos, ErrorKind::kUsage, "{} {}: a \"(\" is not closed",
              kFlag, text);
      unit = write_out(text.substr(at, close - at));
      at = close + 1;
    }
    std::size_t times = 1;
    if (at < text.size() && text[at] == '*') {
      const auto* const end = text.data() + text.size();
      const auto [stop, error] = std::from_chars(text.data() + at + 1, end, times);
      require(error == std::errc() && times >= 1 && times <= kMaxLength, ErrorKind::kUsage,
              "{} {}: a number is expected after \"*\"", kFlag, text);
      at = static_cast<std::size_t>(stop - text.data());
    }
    require(written.size() + unit.size() * times <= kMaxLength, ErrorKind::kUsage,
            "{} {}: is too long", kFlag, text);
    for (std::size_t i = 0; i < times; ++i) written += unit;
  }
  return written;
}

// "E" embedding, "t" transformer layer, "m" prediction layer, "L" loss; "|" between chunks, which
// go to the stages in turn.
PipelineStages parse_layout(const ParallelConfig& parallel, int num_layers, int mtp_num_layers) {
  const auto& text = parallel.pipeline_model_parallel_layout;
  const auto written = write_out(text);
  const auto chunks = static_cast<int>(std::ranges::count(written, '|')) + 1;
  const int stages = parallel.pipeline_model_parallel_size;
  require(chunks % stages == 0, ErrorKind::kUsage,
          "{} {}: {} chunks cannot be shared out over {} pipeline stages", kFlag, text, chunks,
          stages);
  PipelineStages result{.embedding = -1, .loss = -1, .num_chunks = chunks / stages};
  int chunk = 0;
  for (const char letter : written) {
    const int stage = chunk % stages;
    switch (letter) {
      case '|':
        ++chunk;
        break;
      case 'E':
        require(result.embedding < 0 && chunk == 0 && result.layers.empty(), ErrorKind::kUsage,
                "{} {}: the embedding E comes once, and first", kFlag, text);
        result.embedding = stage;
        break;
      case 't':
        result.layers.push_back(stage);
        result.layer_chunks.push_back(chunk / stages);
        break;
      case 'm':
        result.mtp.push_back(stage);
        result.mtp_chunks.push_back(chunk / stages);
        break;
      case 'L':
        require(result.loss < 0 && chunk == chunks - 1, ErrorKind::kUsage,
                "{} {}: the loss L comes once, and last", kFlag, text);
        result.loss = stage;
        break;
      default:
        fail(ErrorKind::kUsage, "{} {}: \"{}\" is none of E, t, m, L, | and ,", kFlag, text,
             letter);
    }
  }
  require(result.embedding >= 0 && result.loss >= 0, ErrorKind::kUsage,
          "{} {}: has no embedding E or no loss L", kFlag, text);
  require(static_cast<int>(result.layers.size()) == num_layers, ErrorKind::kUsage,
          "{} {}: has {} layers t, the model {}", kFlag, text, result.layers.size(), num_layers);
  require(static_cast<int>(result.mtp.size()) == mtp_num_layers, ErrorKind::kUsage,
          "{} {}: has {} prediction layers m, the model {}", kFlag, text, result.mtp.size(),
          mtp_num_layers);
  return result;
}

}  // namespace

PipelineStages pipeline_stages(const ParallelConfig& parallel, int num_layers, int mtp_num_layers) {
  if (!parallel.pipeline_model_parallel_layout.empty()) {
    require(!parallel.num_layers_in_first_pipeline_stage &&
                !parallel.num_layers_in_last_pipeline_stage &&
                !parallel.account_for_embedding_in_pipeline_split &&
                !parallel.account_for_loss_in_pipeline_split &&
                !parallel.virtual_pipeline_model_parallel_size,
            ErrorKind::kUsage, "{}: says already what each stage has; leave the other options away",
            kFlag);
    return parse_layout(parallel, num_layers, mtp_num_layers);
  }
  const int stages = parallel.pipeline_model_parallel_size;
  const int chunks = parallel.virtual_pipeline_model_parallel_size.value_or(1);
  require(chunks == 1 || stages > 1, ErrorKind::kUsage,
          "--vpp {}: needs more than one pipeline stage", chunks);
  require(stages > 1 || !(parallel.account_for_embedding_in_pipeline_split ||
                          parallel.account_for_loss_in_pipeline_split),
          ErrorKind::kUsage, "{}: has no effect: one pipeline stage has everything",
          parallel.account_for_embedding_in_pipeline_split
              ? "--account-for-embedding-in-pipeline-split"
              : "--account-for-loss-in-pipeline-split");
  // The embedding and the loss may count as a layer each, which the first and the last chunk lack.
  const int embedding = parallel.account_for_embedding_in_pipeline_split ? 1 : 0;
  const int loss = parallel.account_for_loss_in_pipeline_split ? 1 : 0;
  const auto per_stage = parallel.layers_per_stage(num_layers + embedding + loss);
  PipelineStages result{.loss = stages - 1, .num_chunks = chunks};
  for (int chunk = 0; chunk < chunks; ++chunk) {
    for (int stage = 0; stage < stages; ++stage) {
      const int of_stage = per_stage[static_cast<std::size_t>(stage)];
      if (of_stage % chunks != 0) {
        fail(ErrorKind::kUsage,
             "--vpp {}: the {} layers of pipeline stage {} cannot be split so; their divisors can: "
             "{}",
             chunks, of_stage, stage, fmt::join(divisors(of_stage), ", "));
      }
      int count = of_stage / chunks;
      if (chunk == 0 && stage == 0) count -= embedding;
      if (chunk == chunks - 1 && stage == stages - 1) count -= loss;
      const auto num_layers_there = static_cast<std::size_t>(std::max(count, 0));
      result.layers.insert(result.layers.end(), num_layers_there, stage);
      result.layer_chunks.insert(result.layer_chunks.end(), num_layers_there, chunk);
    }
  }
  require(static_cast<int>(result.layers.size()) == num_layers, ErrorKind::kUsage,
          "{} layers cannot be shared out over {} stages with the embedding and the loss counted",
          num_layers, stages);
  result.mtp.assign(static_cast<std::size_t>(mtp_num_layers), stages - 1);
  result.mtp_chunks.assign(static_cast<std::size_t>(mtp_num_layers), chunks - 1);
  return result;
}

}  // namespace ferry::models
