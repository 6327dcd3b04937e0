//! Watches the CDI directory and reports changed spec files. The claim manager interprets the changes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::event::{EventKind, ModifyKind};
use tokio::sync::mpsc;
use tokio::time::Instant;

use nodedock_base::tasks::Tasks;
use nodedock_base::watched::{self, Directory};

/// Interval of checking by one `stat` that the watched directory is still the CDI directory.
const CDI_DIRECTORY_LOOK: Duration = Duration::from_millis(500);

/// Names in one event; with more, the whole directory must be checked.
const NAMES_MAX: usize = 4096;

/// A change of the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpecEvent {
    /// Files that were created, removed or changed.
    Touched(BTreeSet<String>),
    /// Any file may have changed.
    Unsure,
}

/// Watches `directory` until the tasks stop. The first event is `Unsure`, when the watch exists.
pub async fn watch(directory: PathBuf, tasks: Tasks, events: mpsc::Sender<SpecEvent>) {
    watched::follow(SpecDirectory::new(directory), tasks, events).await;
}

struct SpecDirectory {
    directory: PathBuf,
    touched: BTreeSet<String>,
    unsure: bool,
    looked: Instant,
}

impl SpecDirectory {
    fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            touched: BTreeSet::new(),
            unsure: false,
            looked: Instant::now(),
        }
    }

    fn touch(&mut self, path: &Path) {
        let name = path.file_name().and_then(|name| name.to_str());
        self.touched
            .extend(name.filter(|name| is_spec(name)).map(str::to_owned));
    }
}

/// Runtimes read no other files.
fn is_spec(name: &str) -> bool {
    (name.ends_with(".yaml") || name.ends_with(".json")) && !name.starts_with('.')
}

impl Directory for SpecDirectory {
    type Event = SpecEvent;

    fn path(&self) -> &Path {
        &self.directory
    }

    fn note(&mut self, event: &notify::Event) {
        let of_itself = event.paths.contains(&self.directory);
        // The directory's own times change with each entry.
        let moved = matches!(
            event.kind,
            EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_))
        );
        self.unsure |= event.need_rescan() || (of_itself && moved);
        for path in &event.paths {
            if *path != self.directory {
                self.touch(path);
            }
        }
        self.unsure |= self.touched.len() > NAMES_MAX;
    }

    fn note_gap(&mut self) {
        self.unsure = true;
    }

    fn look(&mut self) -> Vec<SpecEvent> {
        self.looked = Instant::now();
        let touched = std::mem::take(&mut self.touched);
        if std::mem::take(&mut self.unsure) {
            return vec![SpecEvent::Unsure];
        }
        if touched.is_empty() {
            Vec::new()
        } else {
            vec![SpecEvent::Touched(touched)]
        }
    }

    /// The watch does not report that the directory was replaced.
    fn next_look(&self) -> Option<Instant> {
        Some(self.looked + CDI_DIRECTORY_LOOK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Watching {
        directory: tempfile::TempDir,
        tasks: Tasks,
        events: mpsc::Receiver<SpecEvent>,
    }

    impl Watching {
        fn start() -> Self {
            let (directory, tasks) = (tempfile::tempdir().unwrap(), Tasks::new());
            std::fs::create_dir(directory.path().join("cdi")).unwrap();
            let (sender, events) = mpsc::channel(16);
            tasks.spawn(
                "specs",
                watch(directory.path().join("cdi"), tasks.clone(), sender),
            );
            Self {
                directory,
                tasks,
                events,
            }
        }

        fn path(&self) -> PathBuf {
            self.directory.path().join("cdi")
        }

        async fn next(&mut self) -> SpecEvent {
            self.events.recv().await.unwrap()
        }

        /// Collects the names of events until all of them were reported.
        async fn reported(&mut self, wanted: &[&str]) {
            let mut names_seen = BTreeSet::new();
            while !wanted.iter().all(|name| names_seen.contains(*name)) {
                match self.next().await {
                    SpecEvent::Touched(names) => names_seen.extend(names),
                    SpecEvent::Unsure => panic!("nothing is lost"),
                }
            }
            let of_runtimes = ["a.yaml", "b.json", "c.yaml"];
            assert!(
                names_seen
                    .iter()
                    .all(|name| of_runtimes.contains(&name.as_str())),
                "{names_seen:?}"
            );
        }
    }

    #[tokio::test]
    async fn only_changed_spec_files_are_reported() {
        let mut watching = Watching::start();
        assert_eq!(watching.next().await, SpecEvent::Unsure, "the watch is new");
        let path = watching.path();
        for name in [".x.yaml", ".x.tmp", "notes.txt", "a.yaml", "b.json"] {
            std::fs::write(path.join(name), "x").unwrap();
        }
        watching.reported(&["a.yaml", "b.json"]).await;
        std::fs::rename(path.join("a.yaml"), path.join("c.yaml")).unwrap();
        watching.reported(&["a.yaml", "c.yaml"]).await;
        std::fs::remove_file(path.join("b.json")).unwrap();
        watching.reported(&["b.json"]).await;
        assert!(watching.tasks.drain(nodedock_model::limit::DRAIN).await);
    }

    #[tokio::test]
    async fn recreated_directory_is_watched_again() {
        let mut watching = Watching::start();
        assert_eq!(watching.next().await, SpecEvent::Unsure);
        let path = watching.path();
        std::fs::remove_dir(&path).unwrap();
        assert_eq!(watching.next().await, SpecEvent::Unsure, "it is gone");
        std::fs::create_dir(&path).unwrap();
        while watching.next().await != SpecEvent::Unsure {}
        std::fs::write(path.join("a.yaml"), "x").unwrap();
        while !matches!(watching.next().await, SpecEvent::Touched(names) if names.contains("a.yaml"))
        {
            std::fs::write(path.join("a.yaml"), "x").unwrap();
        }
    }

    #[test]
    fn what_overflowed_is_looked_through() {
        let mut directory = SpecDirectory::new("/nowhere".into());
        let overflow = notify::Event::new(EventKind::Other).set_flag(notify::event::Flag::Rescan);
        directory.note(&overflow);
        assert_eq!(directory.look(), [SpecEvent::Unsure]);
        assert_eq!(directory.look(), []);
    }
}
