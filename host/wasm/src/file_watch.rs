//! The drivers directory and the driver images: watch, then list, then events; relist on overflow, on a timer, and on request.
//!
//! A file is reported when it is whole: closed or renamed into place, or unchanged for a while. Side files
//! (`NAME.grant.yaml`, `NAME.config.yaml`, `NAME.wasm.sig`) belong to the driver `NAME.wasm`; a change of any of them is a change of the driver.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use notify::RecursiveMode;
use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::driver_image::{DriverImage, ImageError};
use crate::trust::permissions::{self, Fault};
use nodedock_base::error::chain;
use nodedock_base::file;
use nodedock_base::tasks::Tasks;
use nodedock_base::watched::{self, Directory};
use nodedock_model::{NameSource, limit};

/// A change of a driver's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileEvent {
    /// It is new, or one of its files changed.
    Changed(DriverFiles),
    /// `NAME.wasm` is gone.
    Gone(String),
    /// Every file of the first list was reported: a driver that is not among them is not there.
    Listed,
    /// Users other than root and the daemon's may put files into a directory, or replace it; none: they no longer may.
    Permissions(Vec<Fault>),
    /// Files of the drivers directory that are not loaded, since driver images have their names; none: there are no such files any more.
    Shadowed(Vec<PathBuf>),
}

/// The files of one driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverFiles {
    /// File name without `.wasm`.
    pub stem: String,
    /// Of a driver image, and not of the drivers directory.
    pub is_image: bool,
    /// An error only for a driver image.
    pub wasm: Result<PathBuf, ImageError>,
    pub grant: Option<PathBuf>,
    pub config: Option<PathBuf>,
    pub signature: Option<PathBuf>,
}

/// Device, inode, size, and the times of the last modification and change: a difference means that a file's content may have changed.
type Stamp = (u64, u64, u64, SystemTime, [i64; 2]);

/// The stamps of a driver's files: the driver, its grant, its config, its signature.
type Stamps = [Option<Stamp>; 4];

/// A driver's files, and their stamps.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Listed {
    files: DriverFiles,
    stamps: Stamps,
}

/// By stem.
type Listing = BTreeMap<String, Listed>;

pub(crate) const SUFFIXES: [&str; 4] = [".wasm", ".grant.yaml", ".config.yaml", ".wasm.sig"];

/// Watches `directory` and the images until the tasks stop. The first list is reported like later changes.
pub async fn watch(
    directory: PathBuf,
    images: Vec<DriverImage>,
    tasks: Tasks,
    events: mpsc::Sender<FileEvent>,
) {
    let drivers = DriversDirectory { path: directory, images, ..DriversDirectory::default() };
    watched::follow(drivers, tasks, events).await;
}

/// Names of the drivers' files that exist now. A missing directory has none.
pub fn present(directory: &Path) -> io::Result<Vec<String>> {
    match list(directory, &Listing::new()) {
        Ok((listing, _)) => Ok(listing.into_keys().map(|stem| format!("{stem}{}", SUFFIXES[0])).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The known state of the directory.
#[derive(Default)]
struct DriversDirectory {
    path: PathBuf,
    images: Vec<DriverImage>,
    reported: Listing,
    /// Files that are being written, and when they are reported all the same.
    unsettled: HashMap<PathBuf, Instant>,
    /// Files known to be whole since they were last seen.
    whole: HashSet<PathBuf>,
    /// As they were reported.
    faults: Vec<Fault>,
    shadowed: Vec<PathBuf>,
    complained: bool,
    /// Whether the first list was reported.
    listed: bool,
}

impl Directory for DriversDirectory {
    type Event = FileEvent;

    fn path(&self) -> &Path {
        &self.path
    }

    fn depth(&self) -> RecursiveMode {
        RecursiveMode::NonRecursive
    }

    fn others(&self) -> Vec<PathBuf> {
        let directories = self.images.iter().flat_map(|image| [&image.directory, &image.side_files]);
        directories.cloned().collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn note(&mut self, event: &notify::Event) {
        for path in &event.paths {
            match event.kind {
                EventKind::Access(AccessKind::Close(AccessMode::Write))
                | EventKind::Modify(ModifyKind::Name(_)) => {
                    self.unsettled.remove(path);
                    self.whole.insert(path.clone());
                }
                EventKind::Create(_) | EventKind::Modify(ModifyKind::Data(_) | ModifyKind::Any) => {
                    self.whole.remove(path);
                    // A writer that stalls: its file is taken as it is when nothing has come for ten times the usual.
                    self.unsettled.insert(path.clone(), Instant::now() + limit::FILE_SETTLE * 10);
                }
                EventKind::Remove(_) => {
                    self.unsettled.remove(path);
                    self.whole.remove(path);
                }
                _ => {}
            }
        }
    }

    fn next_look(&self) -> Option<Instant> {
        self.unsettled.values().min().copied()
    }

    fn look(&mut self) -> Vec<FileEvent> {
        let (mut listing, is_complete) = self.list();
        let now = Instant::now();
        self.unsettled.retain(|_, take_at| *take_at > now);
        let mut events = Vec::new();
        match self.find_faults() {
            Ok(faults) if faults != self.faults => {
                self.faults.clone_from(&faults);
                events.push(FileEvent::Permissions(faults));
            }
            Ok(_) => {}
            Err(error) => {
                let directory = self.path.display();
                tracing::warn!(%directory, %error, "who may write the directory of drivers is unknown");
            }
        }
        let shadowed = self.add_images(&mut listing);
        if shadowed != self.shadowed {
            self.shadowed.clone_from(&shadowed);
            events.push(FileEvent::Shadowed(shadowed));
        }
        for (stem, listed) in &listing {
            if self.reported.get(stem) != Some(listed) && self.is_whole(listed, now) {
                events.push(FileEvent::Changed(listed.files.clone()));
                self.reported.insert(stem.clone(), listed.clone());
            }
        }
        let gone = self.reported.extract_if(.., |stem, _| !listing.contains_key(stem));
        events.extend(gone.map(|(stem, _)| FileEvent::Gone(stem)));
        if !self.listed && is_complete && self.reported.len() == listing.len() {
            self.listed = true;
            events.push(FileEvent::Listed);
        }
        self.whole.retain(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            SUFFIXES.iter().any(|s| name.strip_suffix(s).is_some_and(|n| listing.contains_key(n)))
        });
        events
    }
}

impl DriversDirectory {
    /// The drivers of the directory, and whether it could be listed; if not, those that were reported.
    fn list(&mut self) -> (Listing, bool) {
        match list(&self.path, &self.reported) {
            Ok((listing, unread)) => {
                let has_complained = std::mem::replace(&mut self.complained, !unread.is_empty());
                for (driver, error) in unread.iter().filter(|_| !has_complained) {
                    let error = chain(error);
                    tracing::warn!(
                        driver,
                        error,
                        "the files of a driver cannot be looked at, they stay as they were"
                    );
                }
                let is_complete = unread.iter().all(|(stem, _)| listing.contains_key(stem));
                (listing, is_complete)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.complained = false;
                (Listing::new(), true)
            }
            Err(error) => {
                if !std::mem::replace(&mut self.complained, true) {
                    let (directory, error) = (self.path.display(), chain(&error));
                    tracing::warn!(%directory, error, "the directory cannot be listed, its drivers stay");
                }
                (self.reported.clone(), false)
            }
        }
    }

    /// Adds the images, before which files of the same name step back. Returns those files.
    fn add_images(&self, listing: &mut Listing) -> Vec<PathBuf> {
        let is_shadowed = |listed: Listed| {
            let wasm = listed.files.wasm.ok()?;
            (wasm.parent() == Some(&self.path)).then_some(wasm)
        };
        let add = |image: &DriverImage| {
            let listed = match image.files().and_then(Listed::new) {
                Ok(listed) => listed,
                Err(error) => {
                    let directory = image.directory.display();
                    tracing::warn!(%directory, %error, "the files of a driver image cannot be looked at, the driver stays");
                    self.reported.get(&image.name)?.clone()
                }
            };
            listing.insert(image.name.clone(), listed).and_then(is_shadowed)
        };
        self.images.iter().filter_map(add).collect()
    }

    /// Of the directory and those of the images. The directory of an image's grant is that of the daemon's config: a user who may change it
    /// may change the config, and there is nothing left to protect.
    fn find_faults(&self) -> io::Result<Vec<Fault>> {
        let mut found: Vec<Fault> = Vec::new();
        for directory in std::iter::once(&self.path).chain(self.images.iter().map(|image| &image.directory)) {
            for fault in permissions::of_directory(directory)? {
                if !found.contains(&fault) {
                    found.push(fault);
                }
            }
        }
        Ok(found)
    }

    fn is_whole(&mut self, listed: &Listed, now: Instant) -> bool {
        let mut whole = true;
        for (path, stamp) in listed.files.paths().into_iter().zip(&listed.stamps) {
            let (Some(path), Some(stamp)) = (path, stamp) else { continue };
            if self.unsettled.contains_key(path) {
                whole = false;
            } else if !self.whole.contains(path) {
                // Nothing was heard of it: it was there before the watch, or the watch missed it.
                if let Some(wait) = settles_in(stamp) {
                    self.unsettled.insert(path.to_owned(), now + wait);
                    whole = false;
                }
            }
        }
        whole
    }
}

impl DriverFiles {
    /// The source of the driver's name.
    pub fn source(&self) -> NameSource {
        if self.is_image { NameSource::image(&self.stem) } else { NameSource::file(&self.stem) }
    }

    /// In the order of the suffixes.
    fn paths(&self) -> [Option<&Path>; 4] {
        let wasm = self.wasm.as_deref().ok();
        [wasm, self.grant.as_deref(), self.config.as_deref(), self.signature.as_deref()]
    }
}

impl Listed {
    fn new(files: DriverFiles) -> io::Result<Self> {
        let mut stamps = Stamps::default();
        for (found, path) in stamps.iter_mut().zip(files.paths()) {
            *found = path.map(stamp).transpose()?.flatten();
        }
        Ok(Self { files, stamps })
    }
}

/// How long until a file without events counts as whole.
fn settles_in(stamp: &Stamp) -> Option<Duration> {
    let (.., modified, _) = stamp;
    let age = SystemTime::now().duration_since(*modified).ok()?;
    limit::FILE_SETTLE.checked_sub(age)
}

/// The drivers of a directory, and those with a file that cannot be looked at, whose files stay as they were: a driver whose file or grant
/// seems to be gone would stop. Known ones first, and the others by name, so that a new file never displaces one that serves.
fn list(directory: &Path, known: &Listing) -> io::Result<(Listing, Vec<(String, io::Error)>)> {
    // Whether a name is new, and the name.
    let (mut names, mut too_many) = (BTreeSet::new(), 0);
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name();
        let Some(stem) = stem(&name) else { continue };
        if !matches!(stamp(&directory.join(&name)), Ok(None)) {
            names.insert((!known.contains_key(stem), stem.to_owned()));
        }
        if names.len() > limit::DRIVER_FILES_MAX {
            names.pop_last();
            too_many += 1;
        }
    }
    if too_many > 0 {
        let max = limit::DRIVER_FILES_MAX;
        tracing::warn!(directory = %directory.display(), too_many, max, "more drivers in the directory than are looked at");
    }
    let (mut listing, mut unread) = (Listing::new(), Vec::new());
    for (_, stem) in names {
        match files(directory, &stem).and_then(Listed::new) {
            Ok(listed) if listed.stamps[0].is_none() => {}
            Ok(listed) => {
                listing.insert(stem, listed);
            }
            Err(error) => {
                listing.extend(known.get(&stem).map(|listed| (stem.clone(), listed.clone())));
                unread.push((stem, error));
            }
        }
    }
    Ok((listing, unread))
}

/// The stem of a driver's file; hidden files are none.
pub fn stem(name: &OsStr) -> Option<&str> {
    let stem = name.to_str()?.strip_suffix(SUFFIXES[0])?;
    (!stem.is_empty() && !stem.starts_with('.')).then_some(stem)
}

/// Follows links: a mounted ConfigMap is a directory of them. None: there is no such file.
fn stamp(path: &Path) -> io::Result<Option<Stamp>> {
    let Some(found) = file::metadata(path)?.filter(std::fs::Metadata::is_file) else { return Ok(None) };
    let changed = [found.ctime(), found.ctime_nsec()];
    Ok(Some((found.dev(), found.ino(), found.size(), found.modified()?, changed)))
}

/// The files of a driver in the drivers directory.
fn files(directory: &Path, stem: &str) -> io::Result<DriverFiles> {
    let path = |index: usize| directory.join(format!("{stem}{}", SUFFIXES[index]));
    Ok(DriverFiles {
        stem: stem.to_owned(),
        is_image: false,
        wasm: Ok(path(0)),
        grant: existing(path(1))?,
        config: existing(path(2))?,
        signature: existing(path(3))?,
    })
}

/// The path, if it leads to a regular file.
pub(crate) fn existing(path: PathBuf) -> io::Result<Option<PathBuf>> {
    Ok(stamp(&path)?.map(|_| path))
}

#[cfg(test)]
mod tests {
    use super::watched::Directory as _;
    use super::*;

    struct Watched {
        dir: tempfile::TempDir,
        events: mpsc::Receiver<FileEvent>,
        tasks: Tasks,
    }

    impl Watched {
        fn new(prepare: impl FnOnce(&Path)) -> Self {
            let dir = tempfile::tempdir().unwrap();
            prepare(dir.path());
            let (sender, events) = mpsc::channel(16);
            let tasks = Tasks::new();
            tasks.spawn("watch", watch(dir.path().to_owned(), Vec::new(), tasks.clone(), sender));
            Self { dir, events, tasks }
        }

        async fn changed(&mut self) -> DriverFiles {
            match self.next().await {
                FileEvent::Changed(files) => files,
                other => panic!("{other:?}"),
            }
        }

        async fn next(&mut self) -> FileEvent {
            match self.events.recv().await.unwrap() {
                FileEvent::Listed => self.events.recv().await.unwrap(),
                other => other,
            }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }
    }

    #[tokio::test]
    async fn files_there_at_the_start_and_files_that_come_later_are_reported() {
        let mut watched = Watched::new(|dir| std::fs::write(dir.join("a.wasm"), "a").unwrap());
        assert_eq!(watched.changed().await.stem, "a");
        std::fs::write(watched.path("b.wasm"), "b").unwrap();
        assert_eq!(watched.changed().await.stem, "b");
        std::fs::remove_file(watched.path("a.wasm")).unwrap();
        assert_eq!(watched.next().await, FileEvent::Gone("a".to_owned()));
        assert!(watched.tasks.drain(Duration::from_secs(5)).await);
    }

    #[tokio::test]
    async fn the_end_of_the_first_list_is_reported_once_after_its_files() {
        let mut watched = Watched::new(|dir| {
            std::fs::write(dir.join("a.wasm"), "a").unwrap();
            std::fs::write(dir.join("b.wasm"), "b").unwrap();
        });
        watched.changed().await;
        watched.changed().await;
        assert_eq!(watched.events.recv().await, Some(FileEvent::Listed));
        std::fs::remove_file(watched.path("a.wasm")).unwrap();
        assert_eq!(watched.events.recv().await, Some(FileEvent::Gone("a".to_owned())));
        let mut empty = Watched::new(|_| ());
        assert_eq!(empty.events.recv().await, Some(FileEvent::Listed));
    }

    #[tokio::test]
    async fn a_side_file_is_a_change_of_its_driver_and_other_files_are_not() {
        let mut watched = Watched::new(|dir| std::fs::write(dir.join("a.wasm"), "a").unwrap());
        assert_eq!(watched.changed().await.grant, None);
        std::fs::write(watched.path("b.grant.yaml"), "x").unwrap();
        std::fs::write(watched.path("notes.txt"), "x").unwrap();
        std::fs::write(watched.path(".hidden.wasm"), "x").unwrap();
        std::fs::write(watched.path("a.grant.yaml"), "x").unwrap();
        let files = watched.changed().await;
        assert_eq!((files.stem.as_str(), files.grant), ("a", Some(watched.path("a.grant.yaml"))));
    }

    #[tokio::test]
    async fn a_file_that_is_still_being_written_is_not_taken_before_it_is_closed() {
        use std::io::Write;
        let mut watched = Watched::new(|_| ());
        // The watch is there first: of what was there before it, only the age tells whether it is whole.
        tokio::task::yield_now().await;
        let mut half = std::fs::File::create(watched.path("a.wasm")).unwrap();
        half.write_all(b"first ").unwrap();
        std::fs::write(watched.path("b.wasm"), "b").unwrap();
        assert_eq!(watched.changed().await.stem, "b");
        half.write_all(b"second").unwrap();
        drop(half);
        let files = watched.changed().await;
        assert_eq!(std::fs::read(files.wasm.unwrap()).unwrap(), b"first second");
    }

    #[tokio::test]
    async fn a_signature_that_comes_later_is_a_change_of_its_driver_and_one_that_comes_first_waits_for_it() {
        let mut watched = Watched::new(|dir| std::fs::write(dir.join("a.wasm"), "a").unwrap());
        assert_eq!(watched.changed().await.signature, None);
        std::fs::write(watched.path("b.wasm.sig"), "x").unwrap();
        std::fs::write(watched.path("a.wasm.sig"), "x").unwrap();
        let files = watched.changed().await;
        assert_eq!((files.stem.as_str(), files.signature), ("a", Some(watched.path("a.wasm.sig"))));
        std::fs::write(watched.path("b.wasm"), "b").unwrap();
        assert_eq!(watched.changed().await.signature, Some(watched.path("b.wasm.sig")));
    }

    #[tokio::test]
    async fn a_directory_that_others_may_write_is_reported_before_its_files_and_so_is_its_repair() {
        use std::os::unix::fs::PermissionsExt;
        let mode = |dir: &Path, mode| {
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let mut watched = Watched::new(|dir| {
            std::fs::write(dir.join("a.wasm"), "a").unwrap();
            mode(dir, 0o777);
        });
        let reported = watched.next().await;
        assert!(matches!(&reported, FileEvent::Permissions(faults) if faults.len() == 1), "{reported:?}");
        assert_eq!(watched.changed().await.stem, "a");
        mode(watched.dir.path(), 0o700);
        assert_eq!(watched.next().await, FileEvent::Permissions(Vec::new()));
    }

    /// A file that is whole since long.
    fn put(dir: &Path, stem: &str) {
        let file = std::fs::File::create(dir.join(format!("{stem}.wasm"))).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    }

    /// One link in a circle, or one name that is too long for a grant's, kept every other driver of the directory from being seen.
    #[test]
    fn a_file_that_cannot_be_looked_at_keeps_no_other_from_being_seen() {
        let dir = tempfile::tempdir().unwrap();
        let long = "l".repeat(248);
        put(dir.path(), "a");
        put(dir.path(), &long);
        std::os::unix::fs::symlink("circle.wasm", dir.path().join("circle.wasm")).unwrap();
        let (listing, unread) = list(dir.path(), &Listing::new()).unwrap();
        assert_eq!(listing.keys().collect::<Vec<_>>(), ["a", &long]);
        assert_eq!(unread.iter().map(|(stem, _)| stem.as_str()).collect::<Vec<_>>(), ["circle"]);

        std::os::unix::fs::symlink("a.grant.yaml", dir.path().join("a.grant.yaml")).unwrap();
        let (kept, unread) = list(dir.path(), &listing).unwrap();
        assert_eq!((kept.get("a"), unread.len()), (listing.get("a"), 2), "it stays as it was");
    }

    /// The files listed first were taken, in the order of the file system: a new file displaced a driver that served.
    #[test]
    fn files_beyond_the_bound_displace_no_driver_and_are_taken_by_name_when_there_is_room() {
        let dir = tempfile::tempdir().unwrap();
        let old: Vec<_> = (0..limit::DRIVER_FILES_MAX).map(|n| format!("m{n:03}")).collect();
        old.iter().for_each(|stem| put(dir.path(), stem));
        let mut state = DriversDirectory { path: dir.path().to_owned(), ..DriversDirectory::default() };
        state.look();
        assert!(state.reported.keys().eq(&old));
        (0..limit::DRIVER_FILES_MAX).for_each(|n| put(dir.path(), &format!("a{n:03}")));
        assert_eq!(state.look(), []);

        std::fs::create_dir(dir.path().join("a.wasm")).unwrap();
        std::fs::remove_file(dir.path().join("m100.wasm")).unwrap();
        let reported = state.look().into_iter().map(|event| match event {
            FileEvent::Changed(files) => format!("+{}", files.stem),
            FileEvent::Gone(stem) => format!("-{stem}"),
            other => format!("{other:?}"),
        });
        assert_eq!(reported.collect::<Vec<_>>(), ["+a000", "-m100"]);
        assert_eq!(present(dir.path()).unwrap()[0], "a000.wasm", "a new daemon takes them by name");
    }

    fn image(dir: &Path, name: &str) -> DriverImage {
        let directory = dir.join(name);
        DriverImage { name: name.to_owned(), directory, side_files: dir.to_owned() }
    }

    /// A file that is whole since long, in a directory that is made.
    fn put_in(dir: &Path, name: &str) -> PathBuf {
        std::fs::create_dir_all(dir).unwrap();
        let file = std::fs::File::create(dir.join(name)).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        dir.join(name)
    }

    #[test]
    fn an_image_is_reported_with_its_driver_its_signature_and_the_side_files_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        let gpu = image(at, "gpu");
        let wasm = put_in(&gpu.directory, "driver.wasm");
        let signature = put_in(&gpu.directory, "driver.wasm.sig");
        for ignored in ["gpu.grant.yaml", "driver.grant.yaml", "gpu.config.yaml", ".hidden.wasm", "LICENSE"] {
            put_in(&gpu.directory, ignored);
        }
        let images = vec![gpu, image(at, "none")];
        let path = at.join("drivers");
        let mut state = DriversDirectory { path, images, ..DriversDirectory::default() };
        let found = |events: &[FileEvent], stem: &str| {
            let files = events.iter().find_map(|event| match event {
                FileEvent::Changed(files) if files.stem == stem => Some(files.clone()),
                _ => None,
            });
            files.unwrap_or_else(|| panic!("{stem} in {events:?}"))
        };
        let first = state.look();
        let files = found(&first, "gpu");
        assert_eq!((files.wasm, files.signature), (Ok(wasm), Some(signature)));
        assert_eq!((files.grant, files.config), (None, None), "an image grants itself nothing");
        assert!(matches!(found(&first, "none").wasm, Err(ImageError::Unlisted { .. })), "{first:?}");
        assert_eq!((first.len(), first.last()), (3, Some(&FileEvent::Listed)));
        assert_eq!(state.look(), []);

        let grant = put_in(at, "gpu.grant.yaml");
        assert_eq!(found(&state.look(), "gpu").grant, Some(grant));
        put_in(&at.join("none"), "README.md");
        assert!(matches!(found(&state.look(), "none").wasm, Err(ImageError::Empty { .. })));
        ["b.wasm", "a.wasm", "c.wasm"].iter().for_each(|name| drop(put_in(&at.join("none"), name)));
        let several = found(&state.look(), "none").wasm.unwrap_err();
        assert!(several.to_string().contains("a.wasm and b.wasm"), "{several}");
    }

    #[test]
    fn a_file_with_the_name_of_an_image_steps_back_until_it_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let (path, gpu) = (dir.path().join("drivers"), image(dir.path(), "gpu"));
        let (file, of_image) = (put_in(&path, "gpu.wasm"), put_in(&gpu.directory, "gpu.wasm"));
        put_in(&path, "nic.wasm");
        let mut state = DriversDirectory { path, images: vec![gpu], ..DriversDirectory::default() };
        let first = state.look();
        let [
            FileEvent::Shadowed(shadowed),
            FileEvent::Changed(gpu),
            FileEvent::Changed(nic),
            FileEvent::Listed,
        ] = first.as_slice()
        else {
            panic!("{first:?}")
        };
        assert_eq!((shadowed, &gpu.wasm, nic.stem.as_str()), (&vec![file.clone()], &Ok(of_image), "nic"));
        std::fs::remove_file(file).unwrap();
        assert_eq!(state.look(), [FileEvent::Shadowed(Vec::new())]);
    }

    #[test]
    fn a_drivers_directory_that_cannot_be_listed_keeps_no_image_back_and_is_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, gpu) = (put_in(dir.path(), "drivers"), image(dir.path(), "gpu"));
        put_in(&gpu.directory, "gpu.wasm");
        let mut state =
            DriversDirectory { path: path.clone(), images: vec![gpu], ..DriversDirectory::default() };
        let first = state.look();
        assert!(matches!(first.as_slice(), [FileEvent::Changed(_)]), "{first:?}");
        assert_eq!(state.look(), []);
        std::fs::remove_file(path).unwrap();
        assert_eq!(state.look(), [FileEvent::Listed]);
    }

    /// The directory of the grants is another than that of the image.
    #[tokio::test]
    async fn a_grant_beside_the_config_is_noticed_by_its_own_watch() {
        let dir = tempfile::tempdir().unwrap();
        let (gpu, (sender, mut events)) = (image(dir.path(), "gpu"), mpsc::channel(16));
        put_in(&gpu.directory, "gpu.wasm");
        std::fs::create_dir(dir.path().join("drivers")).unwrap();
        let tasks = Tasks::new();
        tasks.spawn("watch", watch(dir.path().join("drivers"), vec![gpu], tasks.clone(), sender));
        while events.recv().await != Some(FileEvent::Listed) {}
        // Far earlier than the next list on a timer.
        let noticed = tokio::time::timeout(limit::RELIST_PERIOD / 3, async {
            std::fs::write(dir.path().join("gpu.grant.yaml"), "x").unwrap();
            events.recv().await
        });
        let Ok(Some(FileEvent::Changed(files))) = noticed.await else { panic!("it was not noticed") };
        assert_eq!(files.grant, Some(dir.path().join("gpu.grant.yaml")));
        assert!(tasks.drain(Duration::from_secs(5)).await);
    }

    #[tokio::test]
    async fn a_renamed_file_and_a_removed_directory_are_noticed() {
        let mut watched = Watched::new(|dir| std::fs::write(dir.join("x.tmp"), "a").unwrap());
        std::fs::rename(watched.path("x.tmp"), watched.path("a.wasm")).unwrap();
        assert_eq!(watched.changed().await.stem, "a");
        std::fs::remove_dir_all(watched.dir.path()).unwrap();
        assert_eq!(watched.next().await, FileEvent::Gone("a".to_owned()));
    }
}
