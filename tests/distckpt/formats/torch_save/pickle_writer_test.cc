// PickleWriter's pickles are Python's, byte for byte.
#include "distckpt/formats/torch_save/pickle_writer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/pickle.h"

namespace ferry::distckpt {
namespace pickle_writer_test {

using namespace std::string_literals;

// The opcodes behind those of the protocol.
std::string written(PickleWriter& writer) {
  return writer.finish().substr(2);
}

TEST(PickleWriter, SpellsIntsAsPythonDoes) {
  PickleWriter writer;
  writer.begin_list();
  for (const std::int64_t value :
       {std::int64_t{0}, std::int64_t{255}, std::int64_t{256}, std::int64_t{65'536},
        std::int64_t{-1}, std::int64_t{1} << 31, -(std::int64_t{1} << 39),
        std::numeric_limits<std::int64_t>::min()}) {
    writer.integer(value);
  }
  writer.end_list();
  EXPECT_EQ(written(writer),
            "](K\x00K\xFFM\x00\x01J\x00\x00\x01\x00J\xFF\xFF\xFF\xFF"
            "\x8A\x05\x00\x00\x00\x80\x00\x8A\x05\x00\x00\x00\x00\x80"
            "\x8A\x08\x00\x00\x00\x00\x00\x00\x00\x80"
            "e."s);
}

TEST(PickleWriter, SpellsScalarsAsPythonDoes) {
  PickleWriter writer;
  writer.begin_tuple().none().boolean(true).boolean(false).real(1.5).end_tuple();
  EXPECT_EQ(written(writer), "(N\x88\x89G\x3F\xF8\x00\x00\x00\x00\x00\x00t."s);
}

TEST(PickleWriter, WritesShortTuplesWithoutAMark) {
  for (const auto& [dims, opcodes] :
       {std::pair{Dims(), ")."s}, std::pair{Dims({1}), "K\1\x85."s},
        std::pair{Dims({1, 2}), "K\1K\2\x86."s}, std::pair{Dims({1, 2, 3}), "K\1K\2K\3\x87."s},
        std::pair{Dims({1, 2, 3, 4}), "(K\1K\2K\3K\4t."s}}) {
    PickleWriter writer;
    writer.integers(dims);
    EXPECT_EQ(written(writer), opcodes);
  }
}

TEST(PickleWriter, RecallsStringsAndGlobals) {
  PickleWriter writer;
  writer.begin_list().string("a").string("a").size({7}).size({8}).global("torch.Size").end_list();
  EXPECT_EQ(written(writer),
            "](X\1\0\0\0aq\0h\0ctorch\nSize\nq\1K\7\x85\x85Rh\1K\x08\x85\x85Rh\1e."s);
}

TEST(PickleWriter, EmptyContainersSetNothing) {
  PickleWriter writer;
  writer.begin_tuple();
  writer.begin_list().end_list().begin_dict().end_dict();
  writer.begin_object("torch.Tensor").end_object();
  writer.end_tuple();
  EXPECT_EQ(written(writer), "]}ctorch\nTensor\nq\0)\x81\x87."s);
}

TEST(PickleWriter, WritesCallsObjectsAndReferences) {
  PickleWriter writer;
  writer.begin_object_with_state("torch.P").begin_tuple();
  writer.begin_call("torch.layout").string("s").end_call().boolean(false);
  writer.end_tuple().end_object_with_state();
  EXPECT_EQ(written(writer),
            "ctorch\nP\nq\0)\x81"
            "ctorch\nlayout\nq\1X\1\0\0\0sq\2\x85R\x89\x86"
            "b."s);

  PickleWriter reference;
  reference.begin_persistent_id().string("storage").integer(1).end_persistent_id();
  EXPECT_EQ(written(reference), "X\7\0\0\0storageq\0K\1\x86Q."s);

  PickleWriter object;
  object.begin_object("torch.N").string("k").none().end_object();
  EXPECT_EQ(written(object), "ctorch\nN\nq\0)\x81}(X\1\0\0\0kq\1Nub."s);
}

TEST(PickleWriter, IsReadBackBeyondTheShortMemo) {
  PickleWriter writer;
  writer.begin_dict();
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 1'000; ++i) {
      writer.string(fmt::format("key{}", i))
          .integer(std::int64_t{i} * 10'000'000'000 * (round + 1));
    }
  }
  const Pickle pickle = Pickle::parse(writer.end_dict().finish(), {.source = "x.pkl"});
  EXPECT_EQ(pickle.root().size(), 2'000U);
  for (int i = 0; i < 1'000; ++i) {
    EXPECT_EQ(pickle.root().at(fmt::format("key{}", i)).as_int(), std::int64_t{i} * 20'000'000'000);
  }
}

TEST(PickleWriter, RefusesEndsWithoutTheirBegin) {
  EXPECT_THROW(PickleWriter().end_list(), Error);
  EXPECT_THROW(PickleWriter().begin_list().end_tuple(), Error);
  EXPECT_THROW(PickleWriter().begin_list().finish(), Error);
  EXPECT_THROW(PickleWriter().begin_dict().string("a").end_dict(), Error);
  EXPECT_THROW(PickleWriter().begin_object_with_state("torch.P").end_object_with_state(), Error);
  EXPECT_THROW(PickleWriter().global("nomodule"), Error);
}

}  // namespace pickle_writer_test
}  // namespace ferry::distckpt
