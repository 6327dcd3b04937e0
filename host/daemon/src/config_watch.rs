//! The daemon's config file: reports when it must be read again.
//!
//! The directory is watched and not the file: tools replace the file by a new one, and a mounted ConfigMap changes a link beside it. A file
//! that was just written is reported when it is old enough to be whole.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use notify::RecursiveMode;
use notify::event::{AccessKind, EventKind, ModifyKind};
use tokio::sync::mpsc;
use tokio::time::Instant;

use nodedock_base::tasks::Tasks;
use nodedock_base::watched::{self, Directory};
use nodedock_model::limit;

/// Watches until the tasks stop. Reports at once, on changes, and periodically: keys are in files of their own, which may be anywhere.
pub(crate) async fn watch(file: PathBuf, tasks: Tasks, events: mpsc::Sender<()>) {
    watched::follow(ConfigDirectory::new(file), tasks, events).await;
}

struct ConfigDirectory {
    file: PathBuf,
    /// Whether the file may be another one since the last check.
    changed: bool,
    settles: Option<Instant>,
    /// The time of the next periodic report.
    due: Instant,
}

impl ConfigDirectory {
    fn new(file: PathBuf) -> Self {
        Self { file, changed: false, settles: None, due: Instant::now() }
    }
}

impl Directory for ConfigDirectory {
    type Event = ();

    fn path(&self) -> &Path {
        self.file.parent().unwrap_or(Path::new("/"))
    }

    fn depth(&self) -> RecursiveMode {
        RecursiveMode::NonRecursive
    }

    /// Data that is written to other files does not count: a log may be beside the config.
    fn note(&mut self, event: &notify::Event) {
        let writing = matches!(
            event.kind,
            EventKind::Modify(ModifyKind::Data(_) | ModifyKind::Any)
                | EventKind::Access(AccessKind::Close(_))
        );
        self.changed |= event.need_rescan() || !writing || event.paths.contains(&self.file);
    }

    fn note_gap(&mut self) {
        self.changed = true;
    }

    fn look(&mut self) -> Vec<()> {
        let now = Instant::now();
        if !std::mem::take(&mut self.changed) && self.settles.is_none() && now < self.due {
            return Vec::new();
        }
        let modified = std::fs::metadata(&self.file).and_then(|found| found.modified());
        let age = modified.ok().and_then(|at| SystemTime::now().duration_since(at).ok());
        let wait = age.and_then(|age| limit::FILE_SETTLE.checked_sub(age));
        self.settles = wait.map(|wait| now + wait);
        if self.settles.is_some() {
            return Vec::new();
        }
        self.due = now + limit::RELIST_PERIOD;
        vec![()]
    }

    /// A file that is not whole is not reported although a report is due.
    fn next_look(&self) -> Option<Instant> {
        Some(self.settles.unwrap_or(self.due))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITTEN: EventKind = EventKind::Modify(ModifyKind::Any);

    /// How many reports an event of a file leads to.
    fn reports(state: &mut ConfigDirectory, kind: EventKind, name: &str) -> usize {
        let path = state.file.with_file_name(name);
        state.note(&notify::Event::new(kind).add_path(path));
        state.look().len()
    }

    #[test]
    fn data_written_to_other_files_is_not_reported_and_a_moved_link_is() {
        let directory = tempfile::tempdir().unwrap();
        let mut state = ConfigDirectory::new(directory.path().join("nodedock.yaml"));
        assert_eq!(state.look().len(), 1, "the first report comes at once");
        let mut reports = |kind, name: &str| reports(&mut state, kind, name);
        assert_eq!((reports(WRITTEN, "daemon.log"), reports(WRITTEN, "nodedock.yaml")), (0, 1));
        assert_eq!(reports(EventKind::Modify(ModifyKind::Name(notify::event::RenameMode::To)), "..data"), 1);
    }

    /// A log that was written beside the config postponed the report for ever.
    #[tokio::test(start_paused = true)]
    async fn a_report_is_due_in_time_however_often_other_files_are_written() {
        let directory = tempfile::tempdir().unwrap();
        let mut state = ConfigDirectory::new(directory.path().join("nodedock.yaml"));
        assert_eq!(state.look().len(), 1);
        let period = limit::RELIST_PERIOD;
        for _ in 0..3 {
            assert_eq!(state.next_look(), Some(Instant::now() + period));
            for expected in [0, 0, 1] {
                tokio::time::advance(period / 3).await;
                assert_eq!(reports(&mut state, WRITTEN, "daemon.log"), expected);
            }
        }
    }

    #[tokio::test]
    async fn a_replaced_a_written_and_a_removed_file_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("nodedock.yaml");
        std::fs::write(&file, "a").unwrap();
        let (sender, mut events) = mpsc::channel(16);
        let tasks = Tasks::new();
        tasks.spawn("config", watch(file.clone(), tasks.clone(), sender));
        events.recv().await.unwrap();
        std::fs::write(directory.path().join("new"), "b").unwrap();
        std::fs::rename(directory.path().join("new"), &file).unwrap();
        events.recv().await.unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "b");
        std::fs::remove_file(&file).unwrap();
        events.recv().await.unwrap();
        assert!(tasks.drain(limit::DRAIN).await);
    }
}
