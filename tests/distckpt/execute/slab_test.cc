// Tensors that lie transposed are read and written slab by slab, and are the same as if they were
// not.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

#include "distckpt/base/integers.h"
#include "distckpt/execute/executor.h"
#include "tests/support/expect.h"
#include "tests/support/memory_box_io.h"

namespace ferry::distckpt {
namespace slab_test {

using Elements = std::vector<std::uint16_t>;

// Experts whose gate and up take turns, in the model: slabs that begin in no stretch, and none of
// whose dimensions are alike.
constexpr std::int64_t kExperts = 3;
constexpr std::int64_t kIn = 416;
constexpr std::int64_t kOut = 3002;
constexpr std::int64_t kElements = kExperts * kIn * kOut;

ModelTensor experts() {
  return {.name = "experts", .shape = {kExperts, kIn, kOut}, .interleaved = 2};
}

Elements some_elements() {
  Elements elements(static_cast<std::size_t>(kElements));
  for (std::size_t i = 0; i < elements.size(); ++i)
    elements[i] = static_cast<std::uint16_t>(i * 2654435761U >> 9 & 0x3FFF);
  return elements;
}

// One side of a plan over memory.
struct Side {
  Layout layout{};
  TensorMap map{};
  PlanSide plan() const { return {.layout = &layout, .map = &map}; }
};

std::uint32_t add(
    Side& side, const std::string& name, DType dtype, const Shape& shape, void* data) {
  const auto memory = side.layout.add_storage(MemoryStorage{
      .data = static_cast<std::byte*>(data), .size = shape.product() * size_of(dtype)});
  return side.layout.add_tensor({.name = name,
                                 .dtype = dtype,
                                 .shape = shape,
                                 .shards = {packed_shard(Box::whole(shape), dtype, memory, 0)}});
}

Side in_order(Elements& bytes) {
  Side side;
  add(side, "experts", DType::kBF16, experts().shape, bytes.data());
  side.map.links.push_back(BoxLink::whole(0, 0, experts().shape));
  return side;
}

// Megatron's: gate above up, [2, out / 2, in] of each expert.
Side transposed(Elements& bytes) {
  Side side;
  const Shape shape{kExperts, kOut, kIn};
  add(side, "experts", DType::kBF16, shape, bytes.data());
  for (const std::int64_t part : {0, 1}) {
    side.map.links.push_back(
        {.model_box = {.offset = {0, 0, 0, part}, .size = {kExperts, kIn, kOut / 2, 1}},
         .stored_box = {.offset = {0, part * kOut / 2, 0}, .size = {kExperts, kOut / 2, kIn}},
         .axes = {0, 2, 1}});
  }
  return side;
}

Elements transposed_by_hand(const Elements& from) {
  Elements into(from.size());
  std::size_t at = 0;
  for (std::int64_t e = 0; e < kExperts; ++e)
    for (std::int64_t part = 0; part < 2; ++part)
      for (std::int64_t row = 0; row < kOut / 2; ++row)
        for (std::int64_t i = 0; i < kIn; ++i)
          into[at++] = from[static_cast<std::size_t>((e * kIn + i) * kOut + 2 * row + part)];
  return into;
}

// Counts the runs in which files would be read or written.
template <typename Io>
class Counting : public Io {
 public:
  using Io::Io;
  double bytes_of_a_run() const { return static_cast<double>(bytes_) / static_cast<double>(runs_); }

 protected:
  void count(const Region& region) {
    const std::lock_guard lock(mutex_);
    bytes_ += region.num_bytes();
    runs_ += fold_runs(region).num_runs();
  }

 private:
  std::mutex mutex_;
  std::int64_t bytes_ = 0;
  std::int64_t runs_ = 0;
};

class Source : public Counting<support::MemorySource> {
 public:
  using Counting::Counting;
  void read(const Region& region,
            std::span<std::byte> packed,
            std::vector<ChecksumPart>& parts) override {
    count(region);
    MemorySource::read(region, packed, parts);
  }
};

class Sink : public Counting<support::MemorySink> {
 public:
  using Counting::Counting;
  void write(const Region& region,
             std::span<const std::byte> packed,
             std::vector<ChecksumPart>& parts) override {
    count(region);
    MemorySink::write(region, packed, parts);
  }
};

std::vector<Digest> digests_in_order(Elements elements) {
  const auto side = in_order(elements);
  const auto plan = plan_read({experts()}, side.plan());
  Source source(side.layout);
  return Executor({}).submit(plan, source, nullptr).wait().digests;
}

TEST(Slab, IsWrittenInLongRunsWhereTheTargetLiesTransposed) {
  auto elements = some_elements();
  Elements written(elements.size());
  const auto from = in_order(elements);
  const auto into = transposed(written);
  const auto plan = plan_copy({experts()}, from.plan(), into.plan());
  Source source(from.layout);
  Sink sink(into.layout);
  const auto report = Executor({.threads = 2}).submit(plan, source, &sink).wait();
  EXPECT_EQ(written, transposed_by_hand(elements));
  EXPECT_EQ(report.digests, digests_in_order(elements));
  EXPECT_EQ(sink.bytes_written(), 2 * kElements);
  EXPECT_GT(sink.bytes_of_a_run(), 500e3) << "not one for each row of each stretch";
}

TEST(Slab, IsReadOnceWhereTheSourceLiesTransposed) {
  const auto elements = some_elements();
  auto stored = transposed_by_hand(elements);
  Elements written(elements.size());
  const auto from = transposed(stored);
  const auto into = in_order(written);
  const auto plan = plan_copy({experts()}, from.plan(), into.plan());
  Source source(from.layout);
  Sink sink(into.layout);
  const auto report = Executor({.threads = 2}).submit(plan, source, &sink).wait();
  EXPECT_EQ(written, elements);
  EXPECT_EQ(report.digests, digests_in_order(elements));
  EXPECT_EQ(source.bytes_read(), 2 * kElements) << "each byte once";
}

TEST(Slab, IsReadAndWrittenAsItLiesBetweenTransposedSides) {
  const auto elements = some_elements();
  auto stored = transposed_by_hand(elements);
  Elements written(elements.size());
  const auto from = transposed(stored);
  const auto into = transposed(written);
  const auto plan = plan_copy({experts()}, from.plan(), into.plan());
  Source source(from.layout);
  Sink sink(into.layout);
  const auto report = Executor({}).submit(plan, source, &sink).wait();
  EXPECT_EQ(written, stored);
  EXPECT_EQ(report.digests, digests_in_order(elements));
  EXPECT_GT(source.bytes_of_a_run(), 500e3);
  EXPECT_GT(sink.bytes_of_a_run(), 500e3);
}

TEST(Slab, TakesChangesOfStretchesAlong) {
  auto elements = some_elements();
  auto stored = transposed_by_hand(elements);
  Elements written(elements.size());
  const auto from = transposed(stored);
  const auto into = transposed(written);
  const auto plan = plan_copy({experts()}, from.plan(), into.plan());
  Source source(from.layout);
  Sink sink(into.layout);
  const auto amend = [](std::uint32_t, std::int64_t first, std::span<std::byte> bytes) {
    EXPECT_EQ(2 * first % kTaskBytes, 0);
    EXPECT_LE(std::ssize(bytes), kTaskBytes);
    for (auto& byte : bytes) byte ^= std::byte{0x15};
  };
  Executor({.threads = 3, .on_compared = {}, .on_read = amend}).submit(plan, source, &sink).wait();
  for (auto& element : elements) element ^= 0x1515;
  EXPECT_EQ(written, transposed_by_hand(elements));
}

TEST(Slab, NamesTheElementInWhichATransposedCopyDiffers) {
  auto elements = some_elements();
  auto stored = transposed_by_hand(elements);
  // Element [1, 2, 2 * 5 + 1]: row 5 of expert 1's up.
  stored[static_cast<std::size_t>((kOut + kOut / 2 + 5) * kIn + 2)] ^= 1;
  auto side = in_order(elements);
  add(side, "copy", DType::kBF16, {kExperts, kOut, kIn}, stored.data());
  for (auto link : transposed(stored).map.links) {
    link.stored = 1;
    link.copy = 1;
    side.map.links.push_back(link);
  }
  const auto plan = plan_read({experts()}, side.plan());
  Source source(side.layout);
  const auto element = (kIn + 2) * kOut + 11;
  EXPECT_TRUE(support::fails(
      ErrorKind::kLayout,
      {"experts: its second copy differs from the first, at element " + std::to_string(element)},
      [&] { Executor({}).submit(plan, source, nullptr).wait(); }));
}

TEST(Slab, HoldsElementsOfMXFP4AsTheFormulaHasThem) {
  std::vector<std::uint8_t> packs(static_cast<std::size_t>(kElements / 2));
  std::vector<std::uint8_t> exponents(static_cast<std::size_t>(kElements / 32));
  for (std::size_t i = 0; i < packs.size(); ++i)
    packs[i] = static_cast<std::uint8_t>(i * 2654435761U >> 11);
  for (std::size_t i = 0; i < exponents.size(); ++i)
    exponents[i] = static_cast<std::uint8_t>(110 + i * 40503U % 23);
  Side from;
  add(from, "blocks", DType::kU8, {kExperts, kOut, kIn / 2}, packs.data());
  add(from, "scales", DType::kU8, {kExperts, kOut, kIn / 32}, exponents.data());
  from.map.links.push_back({.model_box = Box::whole(experts().shape),
                            .stored_box = Box::whole({kExperts, kOut, kIn / 2}),
                            .axes = {0, 2, 1},
                            .scale = 0});
  from.map.scales.push_back({.stored = 1, .block = {1, 1, 32}, .encoding = Encoding::kE2M1});

  constexpr std::array<float, 8> kValues{0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  Elements wanted(static_cast<std::size_t>(kElements));
  for (std::int64_t e = 0; e < kExperts; ++e)
    for (std::int64_t out = 0; out < kOut; ++out)
      for (std::int64_t i = 0; i < kIn; ++i) {
        const auto row = e * kOut + out;
        const auto pack = packs[static_cast<std::size_t>((row * kIn + i) / 2)];
        const auto nibble = i % 2 == 0 ? pack & 0xF : pack >> 4;
        const auto exponent = exponents[static_cast<std::size_t>((row * kIn + i) / 32)] - 127;
        const auto sign = (nibble & 8) != 0 ? -1.0F : 1.0F;
        const auto value =
            std::ldexp(sign * kValues[static_cast<std::size_t>(nibble & 7)], exponent);
        wanted[static_cast<std::size_t>((e * kIn + i) * kOut + out)] =
            static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);  // exact
      }

  Elements written(wanted.size());
  const auto into = transposed(written);
  const auto plan = plan_copy({experts()}, from.plan(), into.plan());
  Source source(from.layout);
  Sink sink(into.layout);
  const auto report = Executor({}).submit(plan, source, &sink).wait();
  EXPECT_EQ(written, transposed_by_hand(wanted));
  EXPECT_EQ(report.digests, digests_in_order(wanted));
  EXPECT_GT(source.bytes_of_a_run(), 50e3);
}

TEST(Slab, PiecesAloneAreReadAsTheSourceLies) {
  const auto elements = some_elements();
  auto stored = transposed_by_hand(elements);
  Elements written(elements.size());
  const auto from = transposed(stored);
  const auto into = transposed(written);
  const auto plan = plan_copy({experts()}, from.plan(), into.plan());
  Source source(from.layout);
  Sink sink(into.layout);
  Executor({.threads = 2}).submit_pieces(plan, source, sink).wait();
  EXPECT_EQ(written, stored);
  EXPECT_EQ(source.bytes_read(), 2 * kElements);
}

TEST(SlabCut, DividesADimensionEvenlyWhereASlabWouldBeTooLong) {
  const std::int64_t columns = kSlabBytes / 2 / 1000;  // of BF16: a thousand rows and a bit
  PlannedTensor planned{.tensor = {.name = "w", .shape = {2, 1500, columns}}};
  planned.source = {
      {.box = Box::whole(planned.tensor.shape), .at = {.strides = {3000 * columns, 2, 3000}}}};
  const auto cut = slab_cut(planned);
  ASSERT_TRUE(cut);
  EXPECT_EQ(cut->dim, 1);
  EXPECT_EQ(cut->rows, 750);
  const auto last = cut->slab_of(planned.tensor.grid(), 2 * 1500 * columns - 1);
  EXPECT_EQ(last.begin, (1500 + 750) * columns);
  EXPECT_EQ(last.end, 2 * 1500 * columns);
  planned.source[0].at.strides = {3000 * columns, 2 * columns, 2};
  EXPECT_FALSE(slab_cut(planned)) << "it lies in the model's order";
}

TEST(Schedule, GoesThroughAsManySlabsAsSomebodyMayBeAheadOf) {
  PlannedTensor planned{.tensor = {.name = "w", .shape = {16, 2048, 4096}}};  // 16 MiB a slab
  planned.source = {
      {.box = Box::whole(planned.tensor.shape), .at = {.strides = {2 * 2048 * 4096, 2, 2 * 2048}}}};
  planned.targets = {planned.source};
  CopyPlan plan;
  plan.tensors = {planned};
  EXPECT_EQ(make_schedule(plan, true).segments.size(), 4U);
  EXPECT_EQ(make_schedule(plan, true, InOrder::kSlabs).segments.size(), 16U);
  EXPECT_EQ(make_schedule(plan, true, InOrder::kSlabbed).segments.size(), 1U);
  EXPECT_EQ(make_schedule(plan, true, InOrder::kTensors).segments.size(), 1U);
  plan.tensors[0].targets[0][0].at.strides = {2 * 2048 * 4096, 2 * 4096, 2};
  EXPECT_EQ(make_schedule(plan, true).segments.size(), 16U) << "an archive takes them in order";
  plan.tensors[0].source = plan.tensors[0].targets[0];
  EXPECT_EQ(make_schedule(plan, true).segments.size(), 128U)
      << "stretches: nothing lies transposed";
  EXPECT_EQ(make_schedule(plan, true, InOrder::kSlabbed).segments.size(), 128U);
  EXPECT_EQ(make_schedule(plan, true, InOrder::kTensors).segments.size(), 1U);
}

}  // namespace slab_test
}  // namespace ferry::distckpt
