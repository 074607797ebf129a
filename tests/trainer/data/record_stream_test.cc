#include "trainer/data/record_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace record_stream_test {

using support::fails;
using Paths = std::vector<std::filesystem::path>;
using Numbers = std::vector<int>;

// Makes something of {"i": n} with n of 0 and above.
int parse(const Record& record) {
  const auto found = record.find("i");
  require(found != record.end() && found->is_number(), ErrorKind::kCorrupt, "i: is missing");
  return found->get<int>();
}

class RecordStreams : public testing::Test {
 protected:
  // A file of {"i": begin} to {"i": end - 1}, malformed where `is_bad`.
  std::filesystem::path write(
      const std::string& name, int begin, int end, bool (*is_bad)(int) = [](int) {
        return false;
      }) {
    std::string text;
    for (int i = begin; i < end; ++i)
      text += is_bad(i) ? "{\"other\":1}\n" : fmt::format("{{\"i\":{}}}\n", i);
    distckpt::write_text(dir_ / name, text);
    return dir_ / name;
  }

  support::TempDir dir_;
};

Numbers take(RecordStream& stream, int batches, int size) {
  Numbers all;
  for (int i = 0; i < batches; ++i) {
    const auto batch = stream.next_batch(size, parse);
    all.insert(all.end(), batch.begin(), batch.end());
  }
  return all;
}

Numbers sorted(Numbers numbers) {
  std::ranges::sort(numbers);
  return numbers;
}

Numbers range(int begin, int end) {
  Numbers numbers;
  for (int i = begin; i < end; ++i) numbers.push_back(i);
  return numbers;
}

// A small buffer, so that there are several windows: a chunk of 1024 lines has about 10 kB.
constexpr std::int64_t kSmallBuffer = 30'000;

TEST_F(RecordStreams, HoldEachRecordOfAllFilesOnceAnEpoch) {
  const Paths files{write("a.jsonl", 0, 5000), write("b.jsonl", 5000, 5001),
                    write("c.jsonl", 5001, 12'000)};
  for (const std::int64_t buffer : {kSmallBuffer, std::int64_t{1} << 30}) {
    RecordStream stream(files, {.order = {.seed = 1, .shuffle_buffer_bytes = buffer}});
    ASSERT_EQ(stream.num_records(), 12'000);
    const auto first = take(stream, 24, 500);
    EXPECT_EQ(sorted(first), range(0, 12'000));
    EXPECT_NE(first, sorted(first));
    const auto second = take(stream, 24, 500);
    EXPECT_EQ(sorted(second), range(0, 12'000));
    EXPECT_NE(first, second);
    EXPECT_EQ(stream.cursor(), (Cursor{.epoch = 1, .position = 12'000}));
  }
}

TEST_F(RecordStreams, KeepTheOrderOfTheFilesWhereNothingIsShuffled) {
  const Paths files{write("b.jsonl", 0, 3), write("a.jsonl", 3, 9)};
  RecordStream stream(files, {.order = {.shuffle = false}});
  EXPECT_EQ(take(stream, 4, 3), (Numbers{0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2}));
}

TEST_F(RecordStreams, ContinueWhereTheyWereSavedAcrossEpochs) {
  const Paths files{write("a.jsonl", 0, 3000), write("b.jsonl", 3000, 7000)};
  const StreamOptions options{.order = {.seed = 9, .shuffle_buffer_bytes = kSmallBuffer}};
  for (const int before : {0, 1, 13, 69, 70, 71, 139, 140, 150}) {
    RecordStream whole(files, options);
    take(whole, before, 100);
    const auto state = Record::parse(whole.state().dump());
    RecordStream resumed(files, options);
    take(resumed, 3, 64);  // it was somewhere else
    resumed.restore(state);
    EXPECT_EQ(resumed.cursor(), whole.cursor());
    EXPECT_EQ(take(resumed, 75, 100), take(whole, 75, 100)) << before;
  }
}

TEST_F(RecordStreams, RefuseACursorOfOtherData) {
  const Paths files{write("a.jsonl", 0, 30)};
  RecordStream stream(files, {.order = {.seed = 1}});
  const auto state = stream.state();
  RecordStream other(files, {.order = {.seed = 2}});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"data cursor", "seed was 1", "is 2 now"},
                    [&] { other.restore(state); }));
  RecordStream longer({write("a.jsonl", 0, 31)}, {.order = {.seed = 1}});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"files was", "30", "31"}, [&] { longer.restore(state); }));
  auto beyond = state;
  beyond["position"] = 31;
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"position 31"}, [&] { stream.restore(beyond); }));
  for (const char* text : {"{}", "[]", "null", R"({"source": 1})"})
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"no state"}, [&] {
      stream.restore(Record::parse(text));
    })) << text;
  auto lacking = state;
  lacking.erase("epoch");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"epoch"}, [&] { stream.restore(lacking); }));
}

TEST_F(RecordStreams, SkipMalformedRowsAndNameThem) {
  const auto file = write("a.jsonl", 0, 100, [](int i) { return i % 10 == 3; });
  RecordStream stream({file}, {.order = {.shuffle = false}});
  const auto numbers = take(stream, 9, 10);
  EXPECT_EQ(std::ssize(numbers), 90);
  EXPECT_EQ(std::ranges::count_if(numbers, [](int i) { return i % 10 == 3; }), 0);
  EXPECT_EQ(stream.malformed().count, 10);
  ASSERT_EQ(stream.malformed().first.size(), 10U);
  EXPECT_EQ(stream.malformed().first[1].describe(), file.string() + ": line 14: i: is missing");
  const auto told = stream.newly_malformed();
  ASSERT_EQ(told.size(), 10U);
  EXPECT_EQ(told[1].describe(), stream.malformed().first[1].describe());
  EXPECT_TRUE(stream.newly_malformed().empty());
  take(stream, 18, 10);
  EXPECT_EQ(stream.malformed().count, 30);
  EXPECT_EQ(stream.malformed().first.size(), kKeptMalformed);
}

TEST_F(RecordStreams, SayWhereTheRecordsOfABatchLie) {
  RecordStream stream({write("a.jsonl", 0, 8, [](int i) { return i % 3 == 1; })},
                      {.order = {.shuffle = false}});
  const auto line = [&](int number) {
    return fmt::format("{}: line {}", (dir_ / "a.jsonl").string(), number);
  };
  EXPECT_EQ(stream.next_batch(2, parse), (Numbers{0, 2}));
  EXPECT_EQ(stream.places(), (std::vector{line(1), line(3)}));
  EXPECT_EQ(stream.next_batch(2, parse), (Numbers{3, 5}));
  EXPECT_EQ(stream.places(), (std::vector{line(4), line(6)}));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"too long", "reading " + line(7)}, [&] {
    stream.next_batch(2, [](const Record&) -> int { fail(ErrorKind::kUsage, "too long"); });
  }));
}

TEST_F(RecordStreams, CountWhatIsParsedInTheSharesOfRanks) {
  const auto is_bad = [](int i) { return i % 10 == 3; };
  const Paths files{write("a.jsonl", 0, 3000, is_bad), write("b.jsonl", 3000, 3500, is_bad)};
  const RecordStream stream(files, {});
  for (const int ranks : {1, 2, 4, 9}) {
    std::int64_t count = 0;
    for (int rank = 0; rank < ranks; ++rank) count += stream.count_parsed(parse, rank, ranks).count;
    EXPECT_EQ(count, 3150) << ranks;
    const auto first = stream.count_parsed(parse, 0, ranks).malformed.value();
    EXPECT_EQ(first.describe(), files[0].string() + ": line 4: i: is missing") << ranks;
  }
  EXPECT_EQ(stream.cursor(), Cursor{});
  EXPECT_EQ(stream.malformed().count, 0);
  const RecordStream strict(files, {.on_malformed = OnMalformed::kFail});
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"a.jsonl: line 4: i: is missing"},
                    [&] { (void)strict.count_parsed(parse, 0, 1); }));
}

TEST_F(RecordStreams, ContinueIdenticallyAmongMalformedRows) {
  const Paths files{write("a.jsonl", 0, 2000, [](int i) { return i % 3 == 0; })};
  RecordStream whole(files, {.order = {.seed = 4}});
  take(whole, 5, 100);
  RecordStream resumed(files, {.order = {.seed = 4}});
  resumed.restore(whole.state());
  EXPECT_EQ(take(resumed, 20, 100), take(whole, 20, 100));
}

TEST_F(RecordStreams, FailAtAMalformedRowWhereAsked) {
  const auto file = write("a.jsonl", 0, 10, [](int i) { return i == 7; });
  RecordStream stream({file}, {.order = {.shuffle = false}, .on_malformed = OnMalformed::kFail});
  EXPECT_EQ(take(stream, 1, 7), range(0, 7));
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"a.jsonl: line 8: i: is missing"}, [&] { take(stream, 1, 1); }));
}

TEST_F(RecordStreams, PassOnErrorsThatAreNotOfTheRow) {
  RecordStream stream({write("a.jsonl", 0, 10)}, {});
  EXPECT_TRUE(fails(ErrorKind::kBug, {"broken"}, [&] {
    stream.next_batch(1, [](const Record&) -> int { fail(ErrorKind::kBug, "broken"); });
  }));
}

TEST_F(RecordStreams, TryTheirFirstRecordAndStayWhereTheyAre) {
  RecordStream stream({write("a.jsonl", 7, 10)}, {.order = {.shuffle = false}});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"seen 7", "a.jsonl: line 1"}, [&] {
    stream.try_first(
        [](const Record& row) -> int { fail(ErrorKind::kUsage, "seen {}", parse(row)); });
  }));
  stream.try_first([](const Record&) -> int { fail(ErrorKind::kCorrupt, "malformed"); });
  EXPECT_EQ(stream.malformed().count, 0);
  EXPECT_EQ(take(stream, 1, 3), (Numbers{7, 8, 9}));
}

TEST_F(RecordStreams, DropTheRestOfAnEpochOrMakeItABatch) {
  const Paths files{write("a.jsonl", 0, 10)};
  RecordStream dropping(files, {.order = {.shuffle = false}});
  EXPECT_EQ(take(dropping, 3, 4), (Numbers{0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3}));
  RecordStream keeping(files, {.order = {.shuffle = false}, .drop_last = false});
  EXPECT_EQ(take(keeping, 2, 4), range(0, 8));
  EXPECT_EQ(keeping.next_batch(4, parse), (Numbers{8, 9}));
  EXPECT_EQ(keeping.cursor(), (Cursor{.epoch = 1, .position = 0}));
  EXPECT_EQ(keeping.next_batch(4, parse), range(0, 4));
}

TEST_F(RecordStreams, RefuseBatchesThatNoEpochCanFill) {
  RecordStream small({write("a.jsonl", 0, 10)}, {});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"batch of 11", "out of 10"}, [&] { take(small, 1, 11); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"batch of 0"}, [&] { take(small, 1, 0); }));
  RecordStream bad({write("b.jsonl", 0, 10, [](int i) { return i > 1; })}, {});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"batch of 4", "malformed", "b.jsonl: line"},
                    [&] { take(bad, 1, 4); }));
}

TEST_F(RecordStreams, RefuseFilesWithoutRecords) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"no file"}, [] { RecordStream({}, {}); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"a.jsonl", "no record"},
                    [&] { RecordStream({write("a.jsonl", 0, 0)}, {}); }));
}

TEST(ShardOf, GivesEachRankItsRunAndLosesNone) {
  for (const int size : {0, 1, 7, 8, 64}) {
    const auto batch = range(0, size);
    for (const int dp : {1, 2, 3, 8}) {
      Numbers all;
      for (int rank = 0; rank < dp; ++rank) {
        const auto shard = shard_of(batch, rank, dp);
        EXPECT_LE(std::ssize(shard), size / dp + 1);
        EXPECT_GE(std::ssize(shard), size / dp);
        all.insert(all.end(), shard.begin(), shard.end());
      }
      EXPECT_EQ(all, batch);
    }
  }
}

}  // namespace record_stream_test
}  // namespace ferry::trainer
