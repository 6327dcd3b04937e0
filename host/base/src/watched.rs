//! Watches a directory: watch, then list, then events; lists again on overflow, on a timer, and without a watch.
//!
//! Owns the system's watches and the order of the steps. An implementation of `Directory` interprets the entries.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{Config, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::error::chain;
use crate::tasks::Tasks;
use nodedock_model::limit;

/// Queue of events during a list; further events are dropped and the directory is listed again.
const EVENTS_WAITING_MAX: usize = 4096;
/// Delay that groups events, since one command often creates several files.
const GATHER: Duration = Duration::from_millis(10);
/// Interval of lists without a watch.
const POLL_PERIOD: Duration = Duration::from_secs(2);

/// The state of a directory, and the interpretation of its entries.
pub trait Directory {
    type Event;

    fn path(&self) -> &Path;
    fn depth(&self) -> RecursiveMode {
        RecursiveMode::NonRecursive
    }
    /// Returns further directories that a list reads; each is watched as well.
    fn others(&self) -> Vec<PathBuf> {
        Vec::new()
    }
    /// Records what an event shows and a list does not.
    fn note(&mut self, _event: &notify::Event) {}
    /// Records that events may be lost: the watch is new or missing, or its queue overflowed.
    fn note_gap(&mut self) {}
    /// Lists the directory and returns the differences from the last report.
    fn look(&mut self) -> Vec<Self::Event>;
    /// Returns when the directory must be listed without an event.
    fn next_look(&self) -> Option<Instant> {
        None
    }
}

/// Watches a directory until the tasks stop. The first list is reported like later changes.
pub async fn follow<F: Directory>(mut directory: F, tasks: Tasks, events: mpsc::Sender<F::Event>) {
    let (raw, mut arrivals) = mpsc::channel(EVENTS_WAITING_MAX);
    let paths = std::iter::once(directory.path().to_owned()).chain(directory.others());
    let watch = |path| Watched::new(path, directory.depth(), raw.clone());
    let mut watches: Vec<_> = paths.map(watch).collect();
    let stopped = tasks.stopped();
    tokio::pin!(stopped);
    loop {
        if watches.iter_mut().fold(false, |gap, watched| watched.renew() | watched.has_lost() | gap) {
            directory.note_gap();
        }
        for event in directory.look() {
            if events.send(event).await.is_err() {
                return;
            }
        }
        let period = watches.iter().map(Watched::period).min().unwrap_or(POLL_PERIOD);
        let relist = Instant::now() + period;
        let wake = directory.next_look().map_or(relist, |look| look.min(relist));
        tokio::select! {
            // Safe to drop: the next start lists the directory.
            () = &mut stopped => return,
            // Safe to drop: an event that is not received stays in the channel.
            event = arrivals.recv() => {
                let Some(event) = event else { return };
                directory.note(&event);
                tokio::time::sleep(GATHER).await;
                while let Ok(event) = arrivals.try_recv() {
                    directory.note(&event);
                }
            }
            () = tokio::time::sleep_until(wake) => {}
        }
    }
}

/// Reports at once, whenever an entry of a directory may have changed, and periodically.
pub async fn changes(directory: PathBuf, tasks: Tasks, reports: mpsc::Sender<()>) {
    follow(AnyChange(directory), tasks, reports).await;
}

struct AnyChange(PathBuf);

impl Directory for AnyChange {
    type Event = ();

    fn path(&self) -> &Path {
        &self.0
    }

    fn look(&mut self) -> Vec<()> {
        vec![()]
    }
}

/// The system's watch on the directory; created again when the directory was replaced.
struct Watched {
    directory: PathBuf,
    depth: RecursiveMode,
    raw: mpsc::Sender<notify::Event>,
    watcher: Option<RecommendedWatcher>,
    inode: Option<(u64, u64)>,
    complained: bool,
    /// The queue of events overflowed.
    lost: Arc<AtomicBool>,
}

impl Watched {
    fn new(directory: PathBuf, depth: RecursiveMode, raw: mpsc::Sender<notify::Event>) -> Self {
        Self { directory, depth, raw, watcher: None, inode: None, complained: false, lost: Arc::default() }
    }

    /// Returns whether earlier events may be lost.
    fn renew(&mut self) -> bool {
        let inode = std::fs::metadata(&self.directory).ok().map(|found| (found.dev(), found.ino()));
        if self.watcher.is_some() && self.inode == inode {
            return false;
        }
        match self.start() {
            Ok(watcher) => {
                self.watcher = Some(watcher);
                self.inode = inode;
                self.complained = false;
            }
            // The directory does not exist, or the user's watches are used up (fs.inotify).
            Err(error) => {
                self.watcher = None;
                if !std::mem::replace(&mut self.complained, true) {
                    let directory = self.directory.display().to_string();
                    tracing::warn!(
                        directory,
                        error = chain(&error),
                        "cannot watch the directory, listing it instead"
                    );
                }
            }
        }
        true
    }

    fn has_lost(&self) -> bool {
        self.lost.swap(false, Ordering::Relaxed)
    }

    fn start(&self) -> notify::Result<RecommendedWatcher> {
        let (raw, lost) = (self.raw.clone(), self.lost.clone());
        let handle = move |event: notify::Result<notify::Event>| {
            // What an error hides is found by a list, which an event without a path triggers.
            let event = event.unwrap_or_else(|error| {
                if !lost.swap(true, Ordering::Relaxed) {
                    tracing::warn!(error = chain(&error), "the watch of a directory has failed, listing it");
                }
                notify::Event::default()
            });
            // An event in a full channel triggers a list, and a list finds everything.
            if is_change_event(&event) && raw.try_send(event).is_err() {
                lost.store(true, Ordering::Relaxed);
            }
        };
        let mut watcher = RecommendedWatcher::new(handle, Config::default().with_follow_symlinks(false))?;
        watcher.watch(&self.directory, self.depth)?;
        Ok(watcher)
    }

    fn period(&self) -> Duration {
        if self.watcher.is_some() { limit::RELIST_PERIOD } else { POLL_PERIOD }
    }
}

/// Listing a directory opens it, which is an event too: without this filter each list would trigger the next.
fn is_change_event(event: &notify::Event) -> bool {
    let closed_after_writing = AccessKind::Close(AccessMode::Write);
    event.need_rescan() || !matches!(event.kind, EventKind::Access(kind) if kind != closed_after_writing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_new_watch_and_events_without_room_are_gaps() {
        let directory = tempfile::tempdir().unwrap();
        let (raw, mut arrivals) = mpsc::channel(1);
        let mut watched = Watched::new(directory.path().to_owned(), RecursiveMode::NonRecursive, raw);
        assert!(watched.renew() && !watched.renew() && !watched.has_lost());
        // Create, write and close are three events.
        std::fs::write(directory.path().join("a"), "x").unwrap();
        while !watched.has_lost() {
            arrivals.recv().await.unwrap();
            std::fs::write(directory.path().join("a"), "x").unwrap();
        }
        std::fs::remove_dir_all(directory.path()).unwrap();
        assert!(watched.renew() && watched.renew(), "without a watch everything may be missed");
    }

    #[test]
    fn listing_a_directory_is_no_change() {
        let is_change = |kind| is_change_event(&notify::Event::new(kind));
        assert!(!is_change(EventKind::Access(AccessKind::Open(AccessMode::Any))));
        assert!(is_change(EventKind::Access(AccessKind::Close(AccessMode::Write))));
        assert!(is_change(EventKind::Create(notify::event::CreateKind::Any)));
        let overflow = notify::Event::new(EventKind::Other).set_flag(notify::event::Flag::Rescan);
        assert!(is_change_event(&overflow));
    }
}
