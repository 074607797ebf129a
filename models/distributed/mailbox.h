// Messages between two ranks of the world, where the receiver may be busy for longer than the
// timeout of a collective. A call waits for its peer as long as no rank of the world has failed.
// Each time that a collective would have timed out, it asks whether the peer is alive, and waits on
// as long as messages arrive anywhere in the world; a peer that hangs makes it throw in the end.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/error.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace ferry::models {

class World;

class Mailbox {
 public:
  // `limit`: the time that a rank waits while no message arrives anywhere; `hint`: the hint of the
  // Error that it throws then.
  struct Patience {
    std::chrono::milliseconds limit{};
    std::string hint{};
  };

  // Called by all ranks of the world, which outlives the mailbox; `name` is unique among mailboxes.
  Mailbox(World& world, std::string name, Patience patience);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Messages from one rank to another arrive in the order in which they were sent. `what` names the
  // message in errors: "the answer to update_actor". All throw Error(kIo) that says which ranks
  // have failed, or that the peer hangs.
  void send(std::string_view bytes, int to, std::string_view what) const;
  std::string receive(int from, std::string_view what) const;

  struct Letter {
    int to = 0;
    std::string bytes{};
  };
  // Sends all letters, and receives one of each rank of `from`, all at once; at most one goes to a
  // rank. Returns those of `from`, in its order.
  std::vector<std::string> exchange(std::span<const Letter> letters,
                                    std::span<const int> from,
                                    std::string_view what) const;

 private:
  class Watch;

  // `suspect` is named where all others came.
  Error failure(const std::string& what, const std::string& why, const std::string& suspect) const;

  World& world_;
  std::string name_;
  Patience patience_;
  c10::intrusive_ptr<c10d::Backend> gloo_;                   // none for one rank
  mutable std::chrono::steady_clock::time_point counted_{};  // when progress was told of last
};

}  // namespace ferry::models
