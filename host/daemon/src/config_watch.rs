//! The daemon's config file: when it is to be read again. Others say what that means.
//!
//! The folder is watched and not the file: tools put a new file in the place of the old one, and a mounted ConfigMap changes a link
//! beside it. A file that was written just now is left alone until it is old enough to be whole.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use notify::RecursiveMode;
use notify::event::{AccessKind, EventKind, ModifyKind};
use tokio::sync::mpsc;
use tokio::time::Instant;

use nodedock_base::tasks::Tasks;
use nodedock_base::watched::{self, Directory};
use nodedock_model::limit;

/// Watches until the tasks stop. The first word comes at once, and one every while whatever the watch says: keys are in files
/// of their own.
pub(crate) async fn watch(file: PathBuf, tasks: Tasks, events: mpsc::Sender<()>) {
    let Some(folder) = file.parent().map(Path::to_owned) else { return };
    watched::follow(ConfigFolder::new(folder, file), tasks, events).await;
}

struct ConfigFolder {
    folder: PathBuf,
    file: PathBuf,
    events: Events,
    settles: Option<Instant>,
    /// When the next word is to come whatever happens: the keys' files may be anywhere.
    due: Instant,
}

impl ConfigFolder {
    fn new(folder: PathBuf, file: PathBuf) -> Self {
        Self { folder, file, events: Events::None, settles: None, due: Instant::now() }
    }
}

/// What happened since the last look.
#[derive(PartialEq)]
enum Events {
    None,
    /// Other files of the folder were written.
    OfOthers,
    /// The file may be another one.
    Of,
}

impl Directory for ConfigFolder {
    type Event = ();

    fn path(&self) -> &Path {
        &self.folder
    }

    fn depth(&self) -> RecursiveMode {
        RecursiveMode::NonRecursive
    }

    fn note(&mut self, event: &notify::Event) {
        let writing = matches!(
            event.kind,
            EventKind::Modify(ModifyKind::Data(_) | ModifyKind::Any)
                | EventKind::Access(AccessKind::Close(_))
        );
        if event.need_rescan() || !writing || event.paths.contains(&self.file) {
            self.events = Events::Of;
        } else if self.events == Events::None {
            self.events = Events::OfOthers;
        }
    }

    fn note_gap(&mut self) {
        self.events = Events::Of;
    }

    fn look(&mut self) -> Vec<()> {
        let (events, now) = (std::mem::replace(&mut self.events, Events::None), Instant::now());
        if events == Events::OfOthers && self.settles.is_none() && now < self.due {
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

    /// A file that is not whole is not read though the word is due.
    fn next_look(&self) -> Option<Instant> {
        Some(self.settles.unwrap_or(self.due))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITTEN: EventKind = EventKind::Modify(ModifyKind::Any);

    /// How many words an event of a file leads to.
    fn told(state: &mut ConfigFolder, kind: EventKind, name: &str) -> usize {
        let path = state.folder.join(name);
        state.note(&notify::Event::new(kind).add_path(path));
        state.look().len()
    }

    #[test]
    fn what_is_written_beside_the_file_is_no_word_and_a_link_that_moves_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let mut state = ConfigFolder::new(folder.path().into(), folder.path().join("nodedock.yaml"));
        assert_eq!(state.look().len(), 1, "the first word comes at once");
        let mut told = |kind, name: &str| told(&mut state, kind, name);
        assert_eq!((told(WRITTEN, "daemon.log"), told(WRITTEN, "nodedock.yaml")), (0, 1));
        assert_eq!(told(EventKind::Modify(ModifyKind::Name(notify::event::RenameMode::To)), "..data"), 1);
        assert_eq!(state.look().len(), 1, "the time has come to look at the keys");
    }

    /// A log that was written beside the config put the look at the keys off for ever.
    #[tokio::test(start_paused = true)]
    async fn however_often_others_are_written_the_keys_are_looked_at_in_time() {
        let folder = tempfile::tempdir().unwrap();
        let mut state = ConfigFolder::new(folder.path().into(), folder.path().join("nodedock.yaml"));
        assert_eq!(state.look().len(), 1);
        let period = limit::RELIST_PERIOD;
        for _ in 0..3 {
            assert_eq!(state.next_look(), Some(Instant::now() + period));
            for _ in 0..2 {
                tokio::time::advance(period / 3).await;
                assert_eq!(told(&mut state, WRITTEN, "daemon.log"), 0);
            }
            tokio::time::advance(period / 3).await;
            assert_eq!(told(&mut state, WRITTEN, "daemon.log"), 1);
        }
    }

    #[tokio::test]
    async fn a_file_that_is_put_in_its_place_or_written_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("nodedock.yaml");
        std::fs::write(&file, "a").unwrap();
        let (sender, mut events) = mpsc::channel(16);
        let tasks = Tasks::new();
        tasks.spawn("config", watch(file.clone(), tasks.clone(), sender));
        events.recv().await.unwrap();
        std::fs::write(folder.path().join("new"), "b").unwrap();
        std::fs::rename(folder.path().join("new"), &file).unwrap();
        events.recv().await.unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "b");
        std::fs::remove_file(&file).unwrap();
        events.recv().await.unwrap();
        assert!(tasks.drain(limit::DRAIN).await);
    }
}
