//! The drivers directory: watch, then list, then events; relist on overflow, on a timer, and on request.
//!
//! A file is reported when it is whole: closed or renamed into place, or unchanged for a while. Side files
//! (`NAME.grant.yaml`, `NAME.config.yaml`, `NAME.wasm.sig`) belong to the driver `NAME.wasm`; a change of any of them is a change of the driver.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use notify::RecursiveMode;
use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::trust::place::{self, Fault};
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_base::watched::{self, Directory};
use nodedock_model::limit;

/// A change of a driver's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileEvent {
    /// It is new, or one of its files changed.
    Changed(DriverFiles),
    /// `NAME.wasm` is gone.
    Gone(String),
    /// Users other than root and the daemon's may put files into the directory, or replace it; none: they no longer may.
    Place(Vec<Fault>),
}

/// The files of one driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverFiles {
    /// File name without `.wasm`.
    pub stem: String,
    pub wasm: PathBuf,
    pub grant: Option<PathBuf>,
    pub config: Option<PathBuf>,
    pub signature: Option<PathBuf>,
}

/// A change of it means that a file's content may have changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// The stamps of a driver's files: the driver, its grant, its config, its signature.
type Stamps = [Option<Stamp>; 4];
type Listing = BTreeMap<String, Stamps>;

const SUFFIXES: [&str; 4] = [".wasm", ".grant.yaml", ".config.yaml", ".wasm.sig"];

/// Watches `folder` until the tasks stop. The first list is reported like later changes.
pub async fn watch(folder: PathBuf, tasks: Tasks, events: mpsc::Sender<FileEvent>) {
    watched::follow(FolderState::new(folder), tasks, events).await;
}

/// Names of the drivers' files that exist now. A missing directory has none.
pub fn present(folder: &Path) -> io::Result<Vec<String>> {
    match list(folder, &Listing::new()) {
        Ok(listing) => Ok(listing.into_keys().map(|stem| format!("{stem}{}", SUFFIXES[0])).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The known state of the directory.
struct FolderState {
    folder: PathBuf,
    reported: Listing,
    /// Files that are being written, and when they are reported all the same.
    unsettled: HashMap<String, Instant>,
    /// Files known to be whole since they were last seen.
    whole: HashMap<String, ()>,
    /// As they were reported.
    faults: Vec<Fault>,
    complained: bool,
}

impl FolderState {
    fn new(folder: PathBuf) -> Self {
        let (reported, unsettled, whole) = Default::default();
        Self { folder, reported, unsettled, whole, faults: Vec::new(), complained: false }
    }
}

impl Directory for FolderState {
    type Event = FileEvent;

    fn path(&self) -> &Path {
        &self.folder
    }

    fn depth(&self) -> RecursiveMode {
        RecursiveMode::NonRecursive
    }

    fn note(&mut self, event: &notify::Event) {
        for name in
            event.paths.iter().filter_map(|path| path.file_name()).map(|n| n.to_string_lossy().into_owned())
        {
            match event.kind {
                EventKind::Access(AccessKind::Close(AccessMode::Write))
                | EventKind::Modify(ModifyKind::Name(_)) => {
                    self.unsettled.remove(&name);
                    self.whole.insert(name, ());
                }
                EventKind::Create(_) | EventKind::Modify(ModifyKind::Data(_) | ModifyKind::Any) => {
                    self.whole.remove(&name);
                    // A writer that stalls: its file is taken as it is when nothing has come for ten times the usual.
                    self.unsettled.insert(name, Instant::now() + limit::FILE_SETTLE * 10);
                }
                EventKind::Remove(_) => {
                    self.unsettled.remove(&name);
                    self.whole.remove(&name);
                }
                _ => {}
            }
        }
    }

    fn next_look(&self) -> Option<Instant> {
        self.unsettled.values().min().copied()
    }

    fn look(&mut self) -> Vec<FileEvent> {
        let listing = match list(&self.folder, &self.reported) {
            Ok(listing) => listing,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Listing::new(),
            Err(error) => {
                if !std::mem::replace(&mut self.complained, true) {
                    let folder = self.folder.display().to_string();
                    tracing::warn!(
                        folder,
                        error = chain(&error),
                        "the folder cannot be listed, its drivers stay"
                    );
                }
                return Vec::new();
            }
        };
        self.complained = false;
        let now = Instant::now();
        self.unsettled.retain(|_, take_at| *take_at > now);
        let mut events: Vec<_> = self.look_at_place().into_iter().collect();
        for (stem, stamps) in &listing {
            if self.reported.get(stem) != Some(stamps) && self.is_whole(stem, stamps, now) {
                events.push(FileEvent::Changed(files(&self.folder, stem, stamps)));
                self.reported.insert(stem.clone(), *stamps);
            }
        }
        let gone: Vec<_> =
            self.reported.keys().filter(|stem| !listing.contains_key(*stem)).cloned().collect();
        for stem in gone {
            self.reported.remove(&stem);
            events.push(FileEvent::Gone(stem));
        }
        self.whole.retain(|name, ()| {
            SUFFIXES.iter().any(|s| name.strip_suffix(s).is_some_and(|n| listing.contains_key(n)))
        });
        events
    }
}

impl FolderState {
    fn look_at_place(&mut self) -> Option<FileEvent> {
        let faults = place::of_folder(&self.folder);
        if faults == self.faults {
            return None;
        }
        self.faults.clone_from(&faults);
        Some(FileEvent::Place(faults))
    }

    fn is_whole(&mut self, stem: &str, stamps: &Stamps, now: Instant) -> bool {
        let mut whole = true;
        for (suffix, stamp) in SUFFIXES.iter().zip(stamps) {
            let name = format!("{stem}{suffix}");
            let Some(stamp) = stamp else { continue };
            if self.unsettled.contains_key(&name) {
                whole = false;
            } else if !self.whole.contains_key(&name) {
                // Nothing was heard of it: it was there before the watch, or the watch missed it.
                if let Some(wait) = settles_in(stamp) {
                    self.unsettled.insert(name, now + wait);
                    whole = false;
                }
            }
        }
        whole
    }
}

/// How long until a file without events counts as whole.
fn settles_in(stamp: &Stamp) -> Option<Duration> {
    let seconds = u64::try_from(stamp.modified.0).ok()?;
    let nanos = u32::try_from(stamp.modified.1).ok()?;
    let modified = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos);
    let age = SystemTime::now().duration_since(modified).ok()?;
    limit::FILE_SETTLE.checked_sub(age)
}

/// The drivers of a directory: known ones first, and the others by name, so that a new file never displaces one that serves.
fn list(folder: &Path, known: &Listing) -> io::Result<Listing> {
    let mut names = Names::default();
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        let stem = name.to_str().and_then(|name| name.strip_suffix(SUFFIXES[0]));
        let Some(stem) = stem.filter(|stem| !stem.is_empty() && !stem.starts_with('.')) else { continue };
        if stamp(&folder.join(&name)).is_some() {
            names.add(stem, known.contains_key(stem));
        }
    }
    if names.too_many > 0 {
        let (max, too_many) = (limit::DRIVER_FILES_MAX, names.too_many);
        tracing::warn!(folder = %folder.display(), too_many, max, "more drivers in the folder than are looked at");
    }
    let stamped = |(_, stem): (bool, String)| {
        let stamps = SUFFIXES.map(|suffix| stamp(&folder.join(format!("{stem}{suffix}"))));
        stamps[0].is_some().then_some((stem, stamps))
    };
    Ok(names.first.into_iter().filter_map(stamped).collect())
}

/// A bounded number of names.
#[derive(Default)]
struct Names {
    /// Whether a name is new, and the name.
    first: BTreeSet<(bool, String)>,
    too_many: usize,
}

impl Names {
    fn add(&mut self, stem: &str, is_known: bool) {
        self.first.insert((!is_known, stem.to_owned()));
        if self.first.len() > limit::DRIVER_FILES_MAX {
            self.first.pop_last();
            self.too_many += 1;
        }
    }
}

/// Follows links: a mounted ConfigMap is a directory of them. None: there is no such file.
fn stamp(path: &Path) -> Option<Stamp> {
    let found = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some(Stamp {
        device: found.dev(),
        inode: found.ino(),
        size: found.size(),
        modified: (found.mtime(), found.mtime_nsec()),
        changed: (found.ctime(), found.ctime_nsec()),
    })
}

fn files(folder: &Path, stem: &str, stamps: &Stamps) -> DriverFiles {
    let path = |index: usize| folder.join(format!("{stem}{}", SUFFIXES[index]));
    DriverFiles {
        stem: stem.to_owned(),
        wasm: path(0),
        grant: stamps[1].map(|_| path(1)),
        config: stamps[2].map(|_| path(2)),
        signature: stamps[3].map(|_| path(3)),
    }
}

#[cfg(test)]
mod tests {
    use super::watched::Directory as _;
    use super::*;

    struct Folder {
        dir: tempfile::TempDir,
        events: mpsc::Receiver<FileEvent>,
        tasks: Tasks,
    }

    impl Folder {
        fn watched(prepare: impl FnOnce(&Path)) -> Self {
            let dir = tempfile::tempdir().unwrap();
            prepare(dir.path());
            let (sender, events) = mpsc::channel(16);
            let tasks = Tasks::new();
            tasks.spawn("watch", watch(dir.path().to_owned(), tasks.clone(), sender));
            Self { dir, events, tasks }
        }

        async fn changed(&mut self) -> DriverFiles {
            match self.events.recv().await.unwrap() {
                FileEvent::Changed(files) => files,
                other => panic!("{other:?}"),
            }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }
    }

    #[tokio::test]
    async fn files_there_at_the_start_and_files_that_come_later_are_reported() {
        let mut folder = Folder::watched(|dir| std::fs::write(dir.join("a.wasm"), "a").unwrap());
        assert_eq!(folder.changed().await.stem, "a");
        std::fs::write(folder.path("b.wasm"), "b").unwrap();
        assert_eq!(folder.changed().await.stem, "b");
        std::fs::remove_file(folder.path("a.wasm")).unwrap();
        assert_eq!(folder.events.recv().await, Some(FileEvent::Gone("a".to_owned())));
        assert!(folder.tasks.drain(Duration::from_secs(5)).await);
    }

    #[tokio::test]
    async fn a_side_file_is_a_change_of_its_driver_and_other_files_are_not() {
        let mut folder = Folder::watched(|dir| std::fs::write(dir.join("a.wasm"), "a").unwrap());
        assert_eq!(folder.changed().await.grant, None);
        std::fs::write(folder.path("b.grant.yaml"), "x").unwrap();
        std::fs::write(folder.path("notes.txt"), "x").unwrap();
        std::fs::write(folder.path(".hidden.wasm"), "x").unwrap();
        std::fs::write(folder.path("a.grant.yaml"), "x").unwrap();
        let files = folder.changed().await;
        assert_eq!((files.stem.as_str(), files.grant), ("a", Some(folder.path("a.grant.yaml"))));
    }

    #[tokio::test]
    async fn a_file_that_is_still_being_written_is_not_taken_before_it_is_closed() {
        use std::io::Write;
        let mut folder = Folder::watched(|_| ());
        // The watch is there first: of what was there before it, only the age tells whether it is whole.
        tokio::task::yield_now().await;
        let mut half = std::fs::File::create(folder.path("a.wasm")).unwrap();
        half.write_all(b"first ").unwrap();
        std::fs::write(folder.path("b.wasm"), "b").unwrap();
        assert_eq!(folder.changed().await.stem, "b");
        half.write_all(b"second").unwrap();
        drop(half);
        let files = folder.changed().await;
        assert_eq!(std::fs::read(files.wasm).unwrap(), b"first second");
    }

    #[tokio::test]
    async fn a_signature_that_comes_later_is_a_change_of_its_driver_and_one_that_comes_first_waits_for_it() {
        let mut folder = Folder::watched(|dir| std::fs::write(dir.join("a.wasm"), "a").unwrap());
        assert_eq!(folder.changed().await.signature, None);
        std::fs::write(folder.path("b.wasm.sig"), "x").unwrap();
        std::fs::write(folder.path("a.wasm.sig"), "x").unwrap();
        let files = folder.changed().await;
        assert_eq!((files.stem.as_str(), files.signature), ("a", Some(folder.path("a.wasm.sig"))));
        std::fs::write(folder.path("b.wasm"), "b").unwrap();
        assert_eq!(folder.changed().await.signature, Some(folder.path("b.wasm.sig")));
    }

    #[tokio::test]
    async fn a_folder_that_others_may_write_is_told_before_its_files_and_so_is_its_mending() {
        use std::os::unix::fs::PermissionsExt;
        let mode = |dir: &Path, mode| {
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let mut folder = Folder::watched(|dir| {
            std::fs::write(dir.join("a.wasm"), "a").unwrap();
            mode(dir, 0o777);
        });
        let told = folder.events.recv().await.unwrap();
        assert!(matches!(&told, FileEvent::Place(faults) if faults.len() == 1), "{told:?}");
        assert_eq!(folder.changed().await.stem, "a");
        mode(folder.dir.path(), 0o700);
        assert_eq!(folder.events.recv().await, Some(FileEvent::Place(Vec::new())));
    }

    /// A file that is whole since long.
    fn put(dir: &Path, stem: &str) {
        let file = std::fs::File::create(dir.join(format!("{stem}.wasm"))).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    }

    /// What was listed first was what counted, in the order of the file system: a new file took a driver out that served.
    #[test]
    fn files_beyond_the_bound_push_nobody_out_and_are_taken_by_name_when_there_is_room() {
        let dir = tempfile::tempdir().unwrap();
        let old: Vec<_> = (0..limit::DRIVER_FILES_MAX).map(|n| format!("m{n:03}")).collect();
        old.iter().for_each(|stem| put(dir.path(), stem));
        let mut state = FolderState::new(dir.path().to_owned());
        state.look();
        assert!(state.reported.keys().eq(&old));
        (0..limit::DRIVER_FILES_MAX).for_each(|n| put(dir.path(), &format!("a{n:03}")));
        assert_eq!(state.look(), []);

        std::fs::create_dir(dir.path().join("a.wasm")).unwrap();
        std::fs::remove_file(dir.path().join("m100.wasm")).unwrap();
        let told = state.look().into_iter().map(|event| match event {
            FileEvent::Changed(files) => format!("+{}", files.stem),
            FileEvent::Gone(stem) => format!("-{stem}"),
            FileEvent::Place(faults) => format!("{faults:?}"),
        });
        assert_eq!(told.collect::<Vec<_>>(), ["+a000", "-m100"]);
        assert_eq!(present(dir.path()).unwrap()[0], "a000.wasm", "a new daemon takes them by name");
    }

    #[tokio::test]
    async fn a_renamed_file_and_a_folder_made_anew_are_noticed() {
        let mut folder = Folder::watched(|dir| std::fs::write(dir.join("x.tmp"), "a").unwrap());
        std::fs::rename(folder.path("x.tmp"), folder.path("a.wasm")).unwrap();
        assert_eq!(folder.changed().await.stem, "a");
        std::fs::remove_dir_all(folder.dir.path()).unwrap();
        assert_eq!(folder.events.recv().await, Some(FileEvent::Gone("a".to_owned())));
    }
}
