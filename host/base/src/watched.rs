//! Watches a directory: watch, then list, then events; lists again on overflow, on a timer, and without a watch.
//!
//! Owns the system's watches and the order of the steps. An implementation of `Directory` interprets the entries.

use std::collections::BTreeSet;
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
/// Interval of lists without a watch, as of a directory that is not there yet.
const POLL_PERIOD: Duration = Duration::from_secs(2);

/// The state of a directory, and the interpretation of its entries.
pub trait Directory {
    type Event;

    fn path(&self) -> &Path;
    fn depth(&self) -> RecursiveMode {
        RecursiveMode::NonRecursive
    }
    /// Returns further directories that a list reads; each is watched as well. They may be others before each list.
    fn others(&self) -> Vec<PathBuf> {
        Vec::new()
    }
    /// Resolves when the directory must be listed for another reason than an event. Cancel safe.
    fn outdated(&self) -> impl Future<Output = ()> + Send {
        std::future::pending()
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
    let mut watches = Watches::new(directory.depth(), raw);
    let stopped = tasks.stopped();
    tokio::pin!(stopped);
    loop {
        watches.set(std::iter::once(directory.path().to_owned()).chain(directory.others()));
        if watches.renew() {
            directory.note_gap();
        }
        for event in directory.look() {
            if events.send(event).await.is_err() {
                return;
            }
        }
        let relist = Instant::now() + watches.period();
        let wake = directory
            .next_look()
            .map_or(relist, |look| look.min(relist));
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
            // Safe to drop: the next look finds what has changed.
            () = directory.outdated() => {}
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

/// The system's watches on directories, with one queue of events: of these the system gives a user 128.
struct Watches {
    directories: Vec<Watched>,
    depth: RecursiveMode,
    raw: mpsc::Sender<notify::Event>,
    watcher: Option<RecommendedWatcher>,
    /// The queue of events overflowed.
    lost: Arc<AtomicBool>,
}

struct Watched {
    directory: PathBuf,
    /// The directory that is watched; `None`: none is.
    inode: Option<(u64, u64)>,
    complained: bool,
}

impl Watches {
    fn new(depth: RecursiveMode, raw: mpsc::Sender<notify::Event>) -> Self {
        Self {
            directories: Vec::new(),
            depth,
            raw,
            watcher: None,
            lost: Arc::default(),
        }
    }

    /// Sets the directories to watch. What is watched already stays so; `renew` watches the others.
    fn set(&mut self, directories: impl Iterator<Item = PathBuf>) {
        let mut wanted: BTreeSet<PathBuf> = directories.collect();
        let watcher = &mut self.watcher;
        self.directories.retain(|watched| {
            let is_kept = wanted.remove(&watched.directory);
            if let (false, Some(watcher)) = (is_kept, watcher.as_mut()) {
                // no error: one that is not there was not watched
                let _ = watcher.unwatch(&watched.directory);
            }
            is_kept
        });
        self.directories
            .extend(wanted.into_iter().map(|directory| Watched {
                directory,
                inode: None,
                complained: false,
            }));
    }

    /// Watches what is not watched or was replaced. Returns whether earlier events may be lost.
    fn renew(&mut self) -> bool {
        let mut is_gap = self.lost.swap(false, Ordering::Relaxed);
        for index in 0..self.directories.len() {
            let watched = &self.directories[index];
            // no error: a directory that cannot be looked at is watched again, and listed meanwhile
            let inode = std::fs::metadata(&watched.directory)
                .ok()
                .map(|found| (found.dev(), found.ino()));
            let was_watched = watched.inode.is_some();
            if was_watched && watched.inode == inode {
                continue;
            }
            is_gap = true;
            let outcome = self.watch(index);
            let watched = &mut self.directories[index];
            watched.inode = inode.filter(|_| outcome.is_ok());
            match outcome {
                Ok(()) => watched.complained = false,
                // No fault: a program may make it later, or never.
                Err(error) if !was_watched && !watched.complained && is_absent(&error) => {}
                // The directory is gone, or the user's watches are used up (fs.inotify).
                Err(error) if !std::mem::replace(&mut watched.complained, true) => {
                    let directory = watched.directory.display().to_string();
                    tracing::warn!(
                        directory,
                        error = chain(&error),
                        "cannot watch the directory, listing it instead"
                    );
                }
                Err(_) => {}
            }
        }
        is_gap
    }

    fn watch(&mut self, index: usize) -> notify::Result<()> {
        let watcher = match &mut self.watcher {
            Some(watcher) => watcher,
            none => none.insert(watcher(self.raw.clone(), self.lost.clone())?),
        };
        let directory = &self.directories[index].directory;
        // What was there before; an event of its end must not end the new watch.
        if watcher.unwatch(directory).is_ok() {
            tracing::debug!(directory = %directory.display(), "the directory was replaced");
        }
        watcher.watch(directory, self.depth)
    }

    fn period(&self) -> Duration {
        let all_watched = self
            .directories
            .iter()
            .all(|watched| watched.inode.is_some());
        if all_watched {
            limit::RELIST_PERIOD
        } else {
            POLL_PERIOD
        }
    }
}

/// Returns whether there is nothing at the path that was to be watched.
fn is_absent(error: &notify::Error) -> bool {
    match &error.kind {
        notify::ErrorKind::PathNotFound => true,
        notify::ErrorKind::Io(error) => error.kind() == std::io::ErrorKind::NotFound,
        _ => false,
    }
}

fn watcher(
    raw: mpsc::Sender<notify::Event>,
    lost: Arc<AtomicBool>,
) -> notify::Result<RecommendedWatcher> {
    RecommendedWatcher::new(
        move |event: notify::Result<notify::Event>| {
            // What an error hides is found by a list, which an event without a path triggers.
            let event = event.unwrap_or_else(|error| {
                if !lost.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        error = chain(&error),
                        "the watch of a directory has failed, listing it"
                    );
                }
                notify::Event::default()
            });
            // An event in a full channel triggers a list, and a list finds everything.
            if is_change_event(&event) && raw.try_send(event).is_err() {
                lost.store(true, Ordering::Relaxed);
            }
        },
        Config::default().with_follow_symlinks(false),
    )
}

/// Listing a directory opens it, which is an event too: without this filter each list would trigger the next.
fn is_change_event(event: &notify::Event) -> bool {
    let closed_after_writing = AccessKind::Close(AccessMode::Write);
    event.need_rescan()
        || !matches!(event.kind, EventKind::Access(kind) if kind != closed_after_writing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn new_watch_and_overflow_cause_relist() {
        let home = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| home.path().join(name));
        std::fs::create_dir(&one).unwrap();
        std::fs::create_dir(&other).unwrap();
        let (raw, mut arrivals) = mpsc::channel(1);
        let mut watches = Watches::new(RecursiveMode::NonRecursive, raw);
        watches.set([one.clone(), other.clone(), one.clone()].into_iter());
        assert!(watches.renew() && !watches.renew());
        assert_eq!(watches.period(), limit::RELIST_PERIOD);
        // Create, write and close are three events.
        std::fs::write(one.join("a"), "x").unwrap();
        while !watches.renew() {
            arrivals.recv().await.unwrap();
            std::fs::write(one.join("a"), "x").unwrap();
        }
        std::fs::remove_dir_all(&one).unwrap();
        assert!(
            watches.renew() && watches.renew(),
            "without a watch everything may be missed"
        );
        assert_eq!(watches.period(), POLL_PERIOD);
        // The other is watched as before, and the new one as well.
        std::fs::create_dir(&one).unwrap();
        assert!(watches.renew());
        for path in [other.join("b"), one.join("b")] {
            std::fs::write(&path, "x").unwrap();
            while !arrivals.recv().await.unwrap().paths.contains(&path) {
                std::fs::write(&path, "x").unwrap();
            }
        }
        // What is set again is watched as before, and the other no longer.
        let third = home.path().join("third");
        std::fs::create_dir(&third).unwrap();
        watches.set([one.clone(), third.clone()].into_iter());
        assert!(watches.renew());
        let watched = watches.directories.iter();
        let watched: Vec<_> = watched.map(|watched| &watched.directory).collect();
        assert_eq!(watched, [&one, &third]);
        std::fs::write(other.join("c"), "x").unwrap();
        for path in [one.join("c"), third.join("c")] {
            std::fs::write(&path, "x").unwrap();
            loop {
                let event = arrivals.recv().await.unwrap();
                assert!(!event.paths.contains(&other.join("c")), "{event:?}");
                if event.paths.contains(&path) {
                    break;
                }
                std::fs::write(&path, "x").unwrap();
            }
        }
    }

    /// Each start on a fresh machine warned of directories that no program had made yet.
    #[tokio::test]
    async fn absent_directory_is_no_fault() {
        let home = tempfile::tempdir().unwrap();
        let absent = home.path().join("absent");
        let (raw, _arrivals) = mpsc::channel(1);
        let mut watches = Watches::new(RecursiveMode::NonRecursive, raw);
        watches.set([absent.clone()].into_iter());
        assert!(watches.renew() && watches.renew());
        assert!(!watches.directories[0].complained);
        assert_eq!(watches.period(), POLL_PERIOD);
        std::fs::create_dir(&absent).unwrap();
        assert!(watches.renew() && !watches.renew());
        assert_eq!(watches.period(), limit::RELIST_PERIOD);
        // One that was there and is gone is reported.
        std::fs::remove_dir(&absent).unwrap();
        assert!(watches.renew() && watches.directories[0].complained);
    }

    #[test]
    fn listing_a_directory_is_no_change() {
        let is_change = |kind| is_change_event(&notify::Event::new(kind));
        assert!(!is_change(EventKind::Access(AccessKind::Open(
            AccessMode::Any
        ))));
        assert!(is_change(EventKind::Access(AccessKind::Close(
            AccessMode::Write
        ))));
        assert!(is_change(EventKind::Create(notify::event::CreateKind::Any)));
        let overflow = notify::Event::new(EventKind::Other).set_flag(notify::event::Flag::Rescan);
        assert!(is_change_event(&overflow));
    }
}
