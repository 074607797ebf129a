#include "converter/adapter/merge_adapter.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "converter/adapter/adapter_changes.h"
#include "converter/adapter/loops/low_rank.h"
#include "converter/families/quantization.h"
#include "converter/write/requantized_blocks.h"
#include "distckpt/base/error.h"
#include "distckpt/base/threads.h"
#include "distckpt/elements/cast.h"
#include "distckpt/elements/dequantize.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace {

using distckpt::DType;

// The elements of a stretch that lie in one row.
struct RowPart {
  std::int64_t row = 0;
  std::int64_t first = 0;  // column
  std::size_t begin = 0;   // in the stretch
  std::size_t size = 0;
};

template <typename Visit>
void for_each_row(std::int64_t element, std::size_t count, std::int64_t columns, Visit&& visit) {
  for (std::size_t done = 0; done < count;) {
    const auto at = element + static_cast<std::int64_t>(done);
    const auto first = at % columns;
    const auto size = std::min(count - done, static_cast<std::size_t>(columns - first));
    visit(RowPart{.row = at / columns, .first = first, .begin = done, .size = size});
    done += size;
  }
}

std::vector<float> as_floats(DType dtype, std::span<const std::byte> elements) {
  std::vector<float> values(elements.size() / static_cast<std::size_t>(size_of(dtype)));
  const auto into = std::as_writable_bytes(std::span(values));
  if (dtype == DType::kF32) {
    std::ranges::copy(elements, into.begin());
  } else {
    distckpt::cast(dtype, elements, DType::kF32, into, distckpt::CastRule::kRound);
  }
  return values;
}

class MergeAmendment : public Amendment {
 public:
  MergeAmendment(const AdapterToMerge& merged, const ConvertOptions& options)
      : merged_(merged), options_(options) {}

  distckpt::Digest identity() const override { return adapter_->identity(); }
  std::vector<std::filesystem::path> sources() const override { return {merged_.path}; }

  void begin(Checkpoint& source) override {
    // A run that is begun anew holds nothing of the one before.
    in_blocks_.clear();
    blocks_.reset();
    blocks_source_.reset();
    num_elements = num_changed = num_vanished = 0;
    num_rescaled = 0;
    changing_.clear();
    adapter_.emplace(merged_.path, source, merged_.alpha);
    changing_.resize(source.tensors.size());
    std::map<std::string_view, std::size_t> index;
    for (std::size_t i = 0; i < source.tensors.size(); ++i)
      index.emplace(source.tensors[i].name, i);
    for (const auto& adapted : adapter_->tensors()) {
      const auto found = index.find(adapted.tensor);
      if (found == index.end()) {
        throw Error(
            ErrorKind::kLayout,
            fmt::format("{}: the adapter {} changes it, the base lacks it", adapted.tensor, name()),
            has_packed(source, adapted.tensor) ? "weights of four bits are merged into bf16: leave "
                                                 "--keep-quantized away"
                                               : "");
      }
      const auto& tensor = source.tensors[found->second];
      require_fits(adapted, tensor);
      changing_[found->second].push_back(std::make_unique<ChangingWeight>(adapted, tensor.dtype));
    }
    if (options_.keep_quantized) change_blocks(source);
    measure_rows(source);
  }

  void amend(std::uint32_t tensor, std::int64_t element, std::span<std::byte> elements) override {
    for (const auto& weight : changing_[tensor]) {
      const auto size = size_of(weight->dtype);
      const auto first = std::max(element, weight->first_element());
      const auto end = std::min(element + std::ssize(elements) / size, weight->end_element());
      if (first >= end) continue;
      amend_weight(*weight, first - weight->first_element(),
                   elements.subspan(static_cast<std::size_t>((first - element) * size),
                                    static_cast<std::size_t>((end - first) * size)));
    }
  }

  // A stretch as floats before the change, after it, and after the rounding.
  std::int64_t thread_memory() const override {
    constexpr std::int64_t kFloats = 3 * sizeof(float);
    std::int64_t most = blocks_ ? blocks_->thread_memory() : 0;
    for (const auto& weights : changing_) {
      for (const auto& weight : weights)
        most = std::max(most, distckpt::kTaskBytes / size_of(weight->dtype) * kFloats);
    }
    return most;
  }

  void finish(const std::vector<distckpt::Digest>&) override {
    adapter_->require_unchanged();
    if (!blocks_) return;
    const auto counts = blocks_->count(*blocks_source_, counting_threads());
    num_elements += counts.num_elements;
    num_changed += counts.num_changed;
    num_vanished += counts.num_vanished;
    num_rescaled = counts.num_rescaled;
    const bool most_are_left = counts.num_changed > 0 && counts.num_changed >= counts.num_vanished;
    if (merged_.allow_vanished || most_are_left) return;
    throw Error(ErrorKind::kUsage,
                fmt::format("{}: FP8 has {} of {} changes that the adapter {} makes, and leaves {} "
                            "elements as they are",
                            options_.from.string(), counts.num_changed,
                            counts.num_changed + counts.num_vanished, name(), counts.num_vanished),
                "merge into bf16, without --keep-quantized, or take what is left of the adapter by "
                "--allow-vanished");
  }

  std::int64_t num_tensors() const {
    const auto changes = [](const auto& weights) {
      return std::ranges::any_of(weights, [](const auto& one) { return one->adapted.changes(); });
    };
    return std::ranges::count_if(changing_, changes) + std::ranges::count_if(in_blocks_, changes);
  }

  std::atomic<std::int64_t> num_elements = 0;
  std::atomic<std::int64_t> num_changed = 0;
  std::atomic<std::int64_t> num_vanished = 0;
  std::int64_t num_rescaled = 0;

 private:
  struct ChangingWeight {
    ChangingWeight(const AdaptedTensor& of, DType dtype_of) : adapted(of), dtype(dtype_of) {}
    const AdaptedTensor& adapted;
    DType dtype;
    std::mutex mutex{};
    std::shared_ptr<const LowRankChange> change{};  // while some of its elements pass by
    std::int64_t done = 0;
    std::vector<double> squares{};  // of DoRA: of each row's length after the change

    std::int64_t first_element() const { return adapted.first_row * adapted.columns; }
    std::int64_t end_element() const {
      return (adapted.first_row + adapted.rows) * adapted.columns;
    }
  };

  std::string name() const { return merged_.path.string(); }

  std::int64_t counting_threads() const {
    const auto threads = distckpt::reading_threads(options_.threads, options_.from);
    const auto affordable = options_.max_memory / std::max<std::int64_t>(1, thread_memory());
    return std::clamp<std::int64_t>(affordable, 1, distckpt::threads_or_cores(threads));
  }

  // True if the source has the weight in another form.
  static bool has_packed(const Checkpoint& source, const std::string& weight) {
    return std::ranges::any_of(source.tensors, [&](const distckpt::ModelTensor& tensor) {
      return tensor.name != weight && quantized_weight(tensor.name) == weight;
    });
  }

  void require_fits(const AdaptedTensor& adapted, const distckpt::ModelTensor& tensor) const {
    if (adapted.whole) return require_plain(tensor);
    const distckpt::Shape shape{adapted.rows, adapted.columns};
    const int rank = tensor.shape.rank();
    const bool is_stack = rank == 3 && adapted.num_experts > 1;
    const bool fits = (rank == 2 || is_stack) && tensor.shape[rank - 2] == shape[0] &&
                      tensor.shape[rank - 1] == shape[1];
    require(fits, ErrorKind::kLayout, "{}: is {}, the adapter {} changes {}", tensor.name,
            to_string(tensor.shape), name(), to_string(shape));
    if (options_.keep_quantized && distckpt::can_dequantize(tensor.dtype))
      return;  // change_blocks()
    require_plain(tensor);
  }

  static void require_plain(const distckpt::ModelTensor& tensor) {
    const bool known =
        tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16 || tensor.dtype == DType::kF16;
    require(known, ErrorKind::kLayout, "{}: is {}; adapters are merged into bf16, fp16 and fp32",
            tensor.name, short_name(tensor.dtype));
  }

  // Has the weights in FP8 changed when they are read, with their scales.
  void change_blocks(Checkpoint& source) {
    std::vector<std::uint32_t> weights;
    for (std::uint32_t i = 0; i < changing_.size(); ++i) {
      if (!changing_[i].empty() && distckpt::can_dequantize(source.tensors[i].dtype))
        weights.push_back(i);
    }
    if (weights.empty()) return;
    require_hf_form(source);
    const auto quantization =
        parse_quantization(source.hf->config_text(), source.hf->config_source());
    require(quantization.has_value(), ErrorKind::kLayout, "{}: says nothing of blocks of FP8",
            source.hf->config_source());
    require(quantization->scale_suffix == kScaleSuffix, ErrorKind::kLayout,
            "{}: --keep-quantized changes FP8 with scales of blocks, ...{}, alone",
            source.hf->config_source(), kScaleSuffix);
    blocks_ = RequantizedBlocks::replace(
        source, weights, quantization->block,
        [this](std::uint32_t tensor, std::int64_t element, std::span<float> values) {
          for (const auto& weight : in_blocks_[tensor]) change_values(*weight, element, values);
        });
    blocks_source_ = source.source();
    in_blocks_.resize(changing_.size());
    for (const auto i : weights) std::swap(in_blocks_[i], changing_[i]);
  }

  // Whole rows of the weight from `element` on.
  void change_values(const ChangingWeight& weight,
                     std::int64_t element,
                     std::span<float> values) const {
    const std::vector before(values.begin(), values.end());
    require_base(weight, element, before);
    if (weight.adapted.rank == 0) return;
    // Rows may be read more than once; the adapter keeps the factors that it has read last.
    const auto change = adapter_->load(weight.adapted);
    add_change(weight, change, element, values);
    for_each_row(element, values.size(), weight.adapted.columns, [&](const RowPart& part) {
      const auto row = values.subspan(part.begin, part.size);
      if (!change.magnitude.empty())
        scale_row(change.magnitude[static_cast<std::size_t>(part.row)], square_sum(row), row);
    });
    for (std::size_t i = 0; i < before.size(); ++i) require_finite(weight, before[i], values[i]);
  }

  // Elements of the weight from `element` on.
  void amend_weight(ChangingWeight& weight, std::int64_t element, std::span<std::byte> elements) {
    auto values = as_floats(weight.dtype, elements);
    const auto before = values;
    if (weight.adapted.whole) {
      const auto own = adapter_->saved_elements(weight.adapted, element, std::ssize(values));
      return store(weight, before, own, elements);
    }
    require_base(weight, element, before);
    if (weight.adapted.rank == 0) return;
    const auto change = hold(weight);
    add_change(weight, *change, element, values);
    if (!change->magnitude.empty()) {
      for_each_row(element, values.size(), weight.adapted.columns, [&](const RowPart& part) {
        const auto row = static_cast<std::size_t>(part.row);
        scale_row(change->magnitude[row], weight.squares[row],
                  std::span(values).subspan(part.begin, part.size));
      });
    }
    store(weight, before, values, elements);
    release(weight, static_cast<std::int64_t>(values.size()));
  }

  // Brings a row to its magnitude. peft/tuners/lora/variants.py, DoraLinearVariant: in fp32, the
  // root, then the quotient.
  static void scale_row(float magnitude, double squares, std::span<float> row) {
    const float factor = magnitude / static_cast<float>(std::sqrt(squares));
    for (auto& value : row) value *= factor;
  }

  static double square_sum(std::span<const float> values) {
    double sum = 0;
    for (const float value : values) sum += static_cast<double>(value) * static_cast<double>(value);
    return sum;
  }

  void require_finite(const ChangingWeight& weight, float before, float after) const {
    require(std::isfinite(after) || !std::isfinite(before), ErrorKind::kLayout,
            "{}: the adapter {} makes {} of {}", weight.adapted.tensor, name(), after, before);
  }

  void require_base(const ChangingWeight& weight,
                    std::int64_t element,
                    const std::vector<float>& found) const {
    if (!weight.adapted.base) return;
    const auto saved = adapter_->saved_elements(weight.adapted, element, std::ssize(found));
    require(saved == found, ErrorKind::kLayout,
            "{}: the adapter {} was saved with another weight of the base", weight.adapted.tensor,
            name());
  }

  std::shared_ptr<const LowRankChange> hold(ChangingWeight& weight) const {
    const std::lock_guard lock(weight.mutex);
    if (!weight.change)
      weight.change = std::make_shared<const LowRankChange>(adapter_->load(weight.adapted));
    return weight.change;
  }

  static void release(ChangingWeight& weight, std::int64_t count) {
    const std::lock_guard lock(weight.mutex);
    weight.done += count;
    if (weight.done < weight.adapted.rows * weight.adapted.columns) return;
    weight.change.reset();
    weight.done = 0;
  }

  static void add_change(const ChangingWeight& weight,
                         const LowRankChange& change,
                         std::int64_t element,
                         std::span<float> values) {
    const auto rank = static_cast<std::size_t>(weight.adapted.rank);
    std::vector<float> product(static_cast<std::size_t>(weight.adapted.columns));
    for_each_row(element, values.size(), weight.adapted.columns, [&](const RowPart& part) {
      add_low_rank(std::span(change.left).subspan(static_cast<std::size_t>(part.row) * rank, rank),
                   change.right, weight.adapted.columns, part.first, weight.adapted.scaling,
                   std::span(product).first(part.size), values.subspan(part.begin, part.size));
    });
  }

  // The one rounding; counts what it left of the change.
  void store(const ChangingWeight& weight,
             const std::vector<float>& before,
             const std::vector<float>& after,
             std::span<std::byte> elements) {
    const auto from = std::as_bytes(std::span(after));
    if (weight.dtype == DType::kF32) {
      std::ranges::copy(from, elements.begin());
    } else {
      const auto refused =
          distckpt::cast(DType::kF32, from, weight.dtype, elements, distckpt::CastRule::kRound);
      require(!refused, ErrorKind::kLayout, "{}: {} overflows {}", weight.adapted.tensor,
              after[static_cast<std::size_t>(refused.value_or(0))], short_name(weight.dtype));
    }
    const auto rounded = as_floats(weight.dtype, elements);
    std::int64_t changed = 0;
    std::int64_t vanished = 0;
    for (std::size_t i = 0; i < after.size(); ++i) {
      require_finite(weight, before[i], after[i]);
      if (rounded[i] != before[i]) {
        ++changed;
      } else if (after[i] != before[i]) {
        ++vanished;
      }
    }
    num_elements += static_cast<std::int64_t>(after.size());
    num_changed += changed;
    num_vanished += vanished;
  }

  // DoRA needs the length of each row after the change: those weights are read once before.
  void measure_rows(const Checkpoint& source) {
    std::vector<ChangingWeight*> measured;
    auto plan = distckpt::plan_read(source.tensors, source.side());
    distckpt::CopyPlan part;
    part.scales = plan.scales;
    for (std::uint32_t i = 0; i < changing_.size(); ++i) {
      for (const auto& weight : changing_[i]) {
        if (!weight->adapted.magnitude) continue;
        weight->squares.assign(static_cast<std::size_t>(weight->adapted.rows), 0);
        measured.push_back(weight.get());
        part.tensors.push_back(std::move(plan.tensors[i]));
      }
    }
    if (measured.empty()) return;
    const distckpt::Executor executor(
        {.threads = distckpt::reading_threads(options_.threads, options_.from),
         .max_memory = options_.max_memory,
         .thread_memory = thread_memory(),
         .on_compared = {},
         .on_read = [&](auto index, auto element, auto elements) {
           measure(*measured[index], element, elements);
         }});
    const auto reader = source.source();
    wait_reporting(executor.submit(part, *reader, nullptr), "measuring", {});
  }

  void measure(ChangingWeight& weight, std::int64_t element, std::span<std::byte> elements) const {
    const auto change = hold(weight);
    auto values = as_floats(weight.dtype, elements);
    add_change(weight, *change, element, values);
    for_each_row(element, values.size(), weight.adapted.columns, [&](const RowPart& part) {
      const auto sum = square_sum(std::span(values).subspan(part.begin, part.size));
      const std::lock_guard lock(weight.mutex);
      weight.squares[static_cast<std::size_t>(part.row)] += sum;
    });
    release(weight, static_cast<std::int64_t>(values.size()));
  }

  const AdapterToMerge& merged_;
  const ConvertOptions& options_;
  std::optional<AdapterChanges> adapter_;  // since begin()
  // Matrices that are changed, by tensor of the source.
  std::vector<std::vector<std::unique_ptr<ChangingWeight>>> changing_;
  // The same of those in blocks of FP8 that stay so.
  std::vector<std::vector<std::unique_ptr<ChangingWeight>>> in_blocks_;
  std::shared_ptr<RequantizedBlocks> blocks_;
  std::unique_ptr<distckpt::FileSource> blocks_source_;
};

}  // namespace

MergeReport merge_adapter(ConvertOptions options,
                          const AdapterToMerge& adapter,
                          const ProgressFunction& progress) {
  require(options.keep_quantized || !adapter.allow_vanished, ErrorKind::kUsage,
          "--allow-vanished: has no effect without --keep-quantized");
  MergeAmendment amendment(adapter, options);
  options.amendment = &amendment;
  MergeReport report{.converted = convert(options, progress)};
  if (adapter.path == options.from) report.converted.num_adapter_tensors = 0;  // it is merged
  report.num_tensors = amendment.num_tensors();
  report.num_elements = amendment.num_elements;
  report.num_changed = amendment.num_changed;
  report.num_vanished = amendment.num_vanished;
  report.num_rescaled = amendment.num_rescaled;
  return report;
}

}  // namespace ferry::converter
