// A checkpoint appears whole or not at all. It is written in a working folder beside its target,
// which one run at a time may own, and published by a rename; what an interrupted run left there
// can be resumed.
//
// Others may be able to write where the target goes. So the working folder is trusted only if it is
// this user's, closed to others and marked as ours; all that happens in it goes through its
// descriptor; and what is removed from it is what a run has said that it writes.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "distckpt/storage/held_folder.h"
#include "distckpt/storage/published_modes.h"

namespace ferry::distckpt {

class WorkFolder {
 public:
  using Names = std::vector<std::filesystem::path>;  // of files, relative

  // Creates "<parent>/.<name>.ferry" and locks it. Unless `resume` is set, or what is in it was
  // found to be damaged, what an interrupted run left in it is removed first. Throws Error(kUsage)
  // if another run holds it, or if it or something in it is not ours, and Error(kIo) if it cannot
  // be created. `shown` is the target in the message that another run holds it, if it is another.
  WorkFolder(std::filesystem::path target, bool resume, const std::filesystem::path& shown = {});

  // Unless published or kept, removes the working folder and the parents it made.
  ~WorkFolder();
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;

  const HeldFolder& folder() const { return held_; }
  const std::filesystem::path& path() const { return held_.path(); }
  std::filesystem::path output() const;  // what will become the target
  std::filesystem::path journal() const;

  // Says what will be written below output(): nothing else there is ever removed or published.
  // Durable when it returns.
  void expect(const Names& files);

  // Leaves the folder behind, for --resume.
  void keep() { keep_ = true; }

  // True if an interrupted run got as far as publishing `target`, and only its working folder is
  // left to be removed.
  static bool published_earlier(const std::filesystem::path& target);

  // The target is there, whole: a run that is interrupted from now on has published.
  void mark_published();

  // Makes output() the target, durably and atomically. A target that is there, unless it is an
  // empty folder, is exchanged with it and removed afterwards if `replaceable` allows it: that
  // names the files of a folder, relative to it, or throws. Without it: Error(kUsage).
  void publish(const std::function<Names(const std::filesystem::path&)>& replaceable,
               const PublishedModes& modes = {});

  // Replaces a file beside the target (the tracker), or makes it with `mode`, durably, atomically,
  // and without leaving another one there if it is interrupted.
  void replace_beside(std::string_view name, std::string_view text, unsigned mode) const;

 private:
  void make_parents();
  Descriptor lock();
  bool is_there(const Descriptor& folder) const;
  void put_back() const;
  void require_ours() const;
  void clear(bool all) const;
  void set_modes(const PublishedModes& modes) const;
  void exchange(const std::function<Names(const std::filesystem::path&)>& replaceable);

  std::filesystem::path target_;
  std::string name_;                                 // of the working folder
  std::vector<std::filesystem::path> made_parents_;  // outermost first
  HeldFolder held_;
  Descriptor parent_;
  Descriptor lock_;
  bool keep_ = false;
};

// For ranks that work in a folder that another process owns: looks for it, and holds it from then
// on. False if it is not there yet. Throws Error(kUsage) if it is not ours.
bool join_work_folder(const std::filesystem::path& target, HeldFolder& held);

// No run shall go on with what is in it: the next one begins anew.
void mark_damaged(const HeldFolder& work_folder) noexcept;

}  // namespace ferry::distckpt
