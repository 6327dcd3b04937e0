//! A folder that is followed: watch, then list, then events; list again on overflow, on a timer, and where there is no watch.
//!
//! Owns the system's watch and the order of the steps. What a folder's entries mean is for its `Folder` to say.

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

/// Events that may wait while the folder is listed; beyond that they are dropped and the folder is listed anew.
const EVENTS_WAITING_MAX: usize = 4096;
/// Several files are often made by one command: they are taken together.
const GATHER: Duration = Duration::from_millis(10);
/// How often the folder is listed where the system gives no watch.
const POLL_PERIOD: Duration = Duration::from_secs(2);

/// What is known of a folder, and what its entries mean.
pub trait Folder {
    type Event;

    fn path(&self) -> &Path;
    fn depth(&self) -> RecursiveMode;
    /// Learns from an event what a list does not show.
    fn note(&mut self, event: &notify::Event);
    /// Learns that events may be lost: the watch is new, there is none, or more happened than it could tell.
    fn note_gap(&mut self) {}
    /// Lists the folder and says what is different from what was reported.
    fn look(&mut self) -> Vec<Self::Event>;
    /// When it has to be looked at without an event.
    fn next_look(&self) -> Option<Instant> {
        None
    }
}

/// Follows a folder until the tasks stop. The first list is reported like everything later.
pub async fn follow<F: Folder>(mut folder: F, tasks: Tasks, events: mpsc::Sender<F::Event>) {
    let (raw, mut arrivals) = mpsc::channel(EVENTS_WAITING_MAX);
    let mut watched = Watched::new(folder.path().to_owned(), folder.depth(), raw);
    let stopped = tasks.stopped();
    tokio::pin!(stopped);
    loop {
        if watched.renew() || watched.has_lost() {
            folder.note_gap();
        }
        for event in folder.look() {
            if events.send(event).await.is_err() {
                return;
            }
        }
        let relist = Instant::now() + watched.period();
        let wake = folder.next_look().map_or(relist, |look| look.min(relist));
        tokio::select! {
            // Nothing is lost by stopping: the next start lists the folder.
            () = &mut stopped => return,
            // An event that is not received now stays in the channel.
            event = arrivals.recv() => {
                let Some(event) = event else { return };
                note(&mut folder, &event);
                tokio::time::sleep(GATHER).await;
                while let Ok(event) = arrivals.try_recv() {
                    note(&mut folder, &event);
                }
            }
            () = tokio::time::sleep_until(wake) => {}
        }
    }
}

/// An error needs nothing: it leads to a list, as every event does.
fn note<F: Folder>(folder: &mut F, event: &notify::Result<notify::Event>) {
    if let Ok(event) = event {
        folder.note(event);
    }
}

/// The system's watch on the folder; made anew when the folder is another one than the one watched.
struct Watched {
    folder: PathBuf,
    depth: RecursiveMode,
    raw: mpsc::Sender<notify::Result<notify::Event>>,
    watcher: Option<RecommendedWatcher>,
    inode: Option<(u64, u64)>,
    complained: bool,
    /// An event found no room.
    lost: Arc<AtomicBool>,
}

impl Watched {
    fn new(folder: PathBuf, depth: RecursiveMode, raw: mpsc::Sender<notify::Result<notify::Event>>) -> Self {
        Self { folder, depth, raw, watcher: None, inode: None, complained: false, lost: Arc::default() }
    }

    /// Whether what happened before now may be unknown.
    fn renew(&mut self) -> bool {
        let inode = std::fs::metadata(&self.folder).ok().map(|found| (found.dev(), found.ino()));
        if self.watcher.is_some() && self.inode == inode {
            return false;
        }
        match self.start() {
            Ok(watcher) => {
                self.watcher = Some(watcher);
                self.inode = inode;
                self.complained = false;
            }
            // The folder is not there, or the user's watches are used up (fs.inotify).
            Err(error) => {
                self.watcher = None;
                if !std::mem::replace(&mut self.complained, true) {
                    let folder = self.folder.display().to_string();
                    tracing::warn!(
                        folder,
                        error = chain(&error),
                        "no watch on the folder, listing it instead"
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
            if event.as_ref().map_or(true, tells_of_change) {
                // What waits in a full channel leads to a list, and a list finds everything.
                if raw.try_send(event).is_err() {
                    lost.store(true, Ordering::Relaxed);
                }
            }
        };
        let mut watcher = RecommendedWatcher::new(handle, Config::default().with_follow_symlinks(false))?;
        watcher.watch(&self.folder, self.depth)?;
        Ok(watcher)
    }

    fn period(&self) -> Duration {
        if self.watcher.is_some() { limit::RELIST_PERIOD } else { POLL_PERIOD }
    }
}

/// Listing a folder opens it, which is an event too: taken for a change, each list would lead to the next.
fn tells_of_change(event: &notify::Event) -> bool {
    let closed_after_writing = AccessKind::Close(AccessMode::Write);
    event.need_rescan() || !matches!(event.kind, EventKind::Access(kind) if kind != closed_after_writing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_new_watch_and_events_without_room_are_gaps() {
        let folder = tempfile::tempdir().unwrap();
        let (raw, mut arrivals) = mpsc::channel(1);
        let mut watched = Watched::new(folder.path().to_owned(), RecursiveMode::NonRecursive, raw);
        assert!(watched.renew() && !watched.renew() && !watched.has_lost());
        // Made, written and closed are three events.
        std::fs::write(folder.path().join("a"), "x").unwrap();
        while !watched.has_lost() {
            arrivals.recv().await.unwrap().unwrap();
            std::fs::write(folder.path().join("a"), "x").unwrap();
        }
        std::fs::remove_dir_all(folder.path()).unwrap();
        assert!(watched.renew() && watched.renew(), "without a watch everything may be missed");
    }

    #[test]
    fn reading_a_folder_is_no_change_of_it() {
        let told = |kind| tells_of_change(&notify::Event::new(kind));
        assert!(!told(EventKind::Access(AccessKind::Open(AccessMode::Any))));
        assert!(told(EventKind::Access(AccessKind::Close(AccessMode::Write))));
        assert!(told(EventKind::Create(notify::event::CreateKind::Any)));
        let overflow = notify::Event::new(EventKind::Other).set_flag(notify::event::Flag::Rescan);
        assert!(tells_of_change(&overflow));
    }
}
