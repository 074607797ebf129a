#include "distckpt/formats/torch_save/pickle_copy.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace pickle_copy_test {

constexpr std::string_view kGlobals[] = {"argparse.Namespace", "signal.Signals", "torch.",
                                         "builtins.set"};

Pickle parse(std::string bytes) {
  return Pickle::parse(std::move(bytes), {.source = "test", .allowed_globals = kGlobals});
}

TEST(PickleCopy, WritesWhatItRead) {
  PickleWriter pickle;
  pickle.begin_dict();
  pickle.string("none").none().string("true").boolean(true).string("big").integer(1LL << 40);
  pickle.string("real").real(-0.5).string("text").string("caf\xc3\xa9");
  pickle.string("list").begin_list().integer(1).begin_tuple().integer(2).end_tuple().end_list();
  pickle.string("dtype").global("torch.bfloat16").integer(7).string("integer key");
  pickle.string("signal").begin_call("signal.Signals").integer(15).end_call();
  pickle.string("args").begin_object("argparse.Namespace").string("lr").real(1e-3).end_object();
  pickle.string("set").begin_call("builtins.set").begin_list().integer(3).end_list().end_call();
  pickle.end_dict();
  const auto first = parse(pickle.finish());
  PickleWriter again;
  write_value(again, first.root());
  const auto second = parse(again.finish());
  EXPECT_EQ(second.root().describe(1 << 16), first.root().describe(1 << 16));
  EXPECT_EQ(second.root().size(), 11U);
  EXPECT_EQ(second.root().at("args").find("lr")->as_float(), 1e-3);
}

TEST(PickleCopy, RefusesWhatHasNoTree) {
  // A list that holds itself: ] q0 h0 a .
  const auto cycle =
      parse(std::string("\x80\x02]q\x00h\x00"
                        "a.",
                        9));
  PickleWriter pickle;
  EXPECT_THROW(write_value(pickle, cycle.root()), Error);
  // Bytes have no spelling in protocol 2.
  const auto bytes =
      parse(std::string("\x80\x03"
                        "C\x01"
                        "x.",
                        6));
  EXPECT_THROW(write_value(pickle, bytes.root()), Error);
}

}  // namespace pickle_copy_test
}  // namespace ferry::distckpt
