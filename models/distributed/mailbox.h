// Messages from one rank of the world to another, who may have other things to do for longer than
// any collective may take: they wait until one of the two, or any rank of the world, has failed. A
// peer that is alive at all, asked each time that a collective would have ended, is waited for, as
// long as messages arrive anywhere in the world: one that hangs is not, for ever.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>
#include <string_view>

#include "distckpt/base/error.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace ferry::models {

class World;

class Mailbox {
 public:
  // How long somebody may wait while no message arrives anywhere, and what to do behind it.
  struct Patience {
    std::chrono::milliseconds limit{};
    std::string hint{};
  };

  // Called by all ranks of the world, which outlives it; `name` is no other's.
  Mailbox(World& world, std::string name, Patience patience);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Of one rank to another they arrive in their order. Throws Error(kIo) that says which ranks have
  // failed, or that the peer hangs; `what`: "the answer to update_actor".
  void send(std::string_view bytes, int to, std::string_view what) const;
  std::string receive(int from, std::string_view what) const;

 private:
  void wait(const std::function<c10::intrusive_ptr<c10d::Work>()>& start,
            const std::string& what,
            int peer) const;
  // `suspect` is named where all others came.
  Error failure(const std::string& what, const std::string& why, const std::string& suspect) const;

  World& world_;
  std::string name_;
  Patience patience_;
  c10::intrusive_ptr<c10d::Backend> gloo_;  // none for one rank
};

}  // namespace ferry::models
