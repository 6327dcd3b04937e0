//! The drivers directory and the driver images: watch, then list, then events; relist on overflow, on a timer, and on request.
//!
//! A file is reported when it is whole: closed or renamed into place, or unchanged for a while. Side files
//! (`NAME.grant.yaml`, `NAME.config.yaml`, `NAME.wasm.sig`) belong to the driver `NAME.wasm`; a change of any of them is a change of the driver.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use notify::RecursiveMode;
use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

pub use crate::files::driver_image::stem;
use crate::files::driver_image::{DriverImage, ImageError, SUFFIXES};
use crate::files::trust::permissions::{self, Fault};
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
    /// True for the files of a driver image, false for those of the drivers directory.
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

/// Files by stem.
type Listing = BTreeMap<String, Listed>;

/// Watches `directory` and the images, which may be others at any time, until the tasks stop. The first list is reported like later changes.
pub async fn watch(
    directory: PathBuf,
    images: watch::Receiver<Vec<DriverImage>>,
    tasks: Tasks,
    events: mpsc::Sender<FileEvent>,
) {
    let drivers = DriversDirectory {
        path: directory,
        named: Some(images),
        ..DriversDirectory::default()
    };
    watched::follow(drivers, tasks, events).await;
}

/// Names of the drivers' files that exist now. A missing directory has none.
pub fn present(directory: &Path) -> io::Result<Vec<String>> {
    match list(directory, &Listing::new()) {
        Ok((listing, _)) => Ok(listing
            .into_keys()
            .map(|stem| format!("{stem}{}", SUFFIXES[0]))
            .collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The known state of the directory.
#[derive(Default)]
struct DriversDirectory {
    path: PathBuf,
    /// The images of the last list.
    images: Vec<DriverImage>,
    /// The images as the config names them. None: they are always the same.
    named: Option<watch::Receiver<Vec<DriverImage>>>,
    reported: Listing,
    /// Files that are being written, and when they are reported all the same.
    unsettled: HashMap<PathBuf, Instant>,
    /// Files known to be whole since they were last seen.
    whole: HashSet<PathBuf>,
    /// Faults that were reported.
    faults: Vec<Fault>,
    shadowed: Vec<PathBuf>,
    complained: bool,
    /// True after the first list was reported.
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
        let named = self.named.as_ref().map(|named| named.borrow().clone());
        let images = named.unwrap_or_else(|| self.images.clone());
        let directories = images
            .into_iter()
            .flat_map(|image| [image.directory, image.side_files]);
        directories.collect::<BTreeSet<_>>().into_iter().collect()
    }

    async fn outdated(&self) {
        let changed = match self.named.clone() {
            Some(mut named) => named.changed().await.is_ok(),
            None => false,
        };
        if !changed {
            // The images stay as they are.
            std::future::pending().await
        }
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
                    self.unsettled
                        .insert(path.clone(), Instant::now() + limit::FILE_SETTLE * 10);
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
        if let Some(named) = &mut self.named {
            self.images.clone_from(&named.borrow_and_update());
        }
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
            let before = self.reported.get(stem);
            let is_changed = before != Some(listed);
            let is_other_source =
                before.is_some_and(|before| before.files.is_image != listed.files.is_image);
            if is_changed && self.is_whole(listed, now) {
                // An image in place of a file, or the reverse, is another driver.
                events.extend(is_other_source.then(|| FileEvent::Gone(stem.clone())));
                events.push(FileEvent::Changed(listed.files.clone()));
                self.reported.insert(stem.clone(), listed.clone());
            }
        }
        let gone = self
            .reported
            .extract_if(.., |stem, _| !listing.contains_key(stem));
        events.extend(gone.map(|(stem, _)| FileEvent::Gone(stem)));
        if !self.listed && is_complete && self.reported.len() == listing.len() {
            self.listed = true;
            events.push(FileEvent::Listed);
        }
        self.whole.retain(|path| {
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .unwrap_or_default();
            SUFFIXES.iter().any(|s| {
                name.strip_suffix(s)
                    .is_some_and(|n| listing.contains_key(n))
            })
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
        let shadowed = self.images.iter().filter_map(|image| {
            let listed = match image_files(image).and_then(Listed::new) {
                Ok(listed) => listed,
                Err(error) => {
                    let directory = image.directory.display();
                    tracing::warn!(%directory, %error, "the files of a driver image cannot be looked at, the driver stays");
                    self.reported.get(&image.name)?.clone()
                }
            };
            listing
                .insert(image.name.clone(), listed)
                .and_then(|listed| {
                    let wasm = listed.files.wasm.ok()?;
                    (wasm.parent() == Some(&self.path)).then_some(wasm)
                })
        });
        shadowed.collect()
    }

    /// Returns the faults of the directory and of those of the images. The directory of an image's grant is that of the daemon's config: a
    /// user who may change it may change the config, and there is nothing left to protect.
    fn find_faults(&self) -> io::Result<Vec<Fault>> {
        let mut found: Vec<Fault> = Vec::new();
        for directory in
            std::iter::once(&self.path).chain(self.images.iter().map(|image| &image.directory))
        {
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
            let (Some(path), Some(stamp)) = (path, stamp) else {
                continue;
            };
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
        if self.is_image {
            NameSource::image(&self.stem)
        } else {
            NameSource::file(&self.stem)
        }
    }

    /// Returns the paths in the order of the suffixes.
    fn paths(&self) -> [Option<&Path>; 4] {
        let wasm = self.wasm.as_deref().ok();
        [
            wasm,
            self.grant.as_deref(),
            self.config.as_deref(),
            self.signature.as_deref(),
        ]
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

/// Returns the time until a file without events counts as whole.
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
                listing.extend(
                    known
                        .get(&stem)
                        .map(|listed| (stem.clone(), listed.clone())),
                );
                unread.push((stem, error));
            }
        }
    }
    Ok((listing, unread))
}

/// The files of an image's driver that exist now.
fn image_files(image: &DriverImage) -> io::Result<DriverFiles> {
    let wasm = image.find();
    let signature = wasm.as_ref().ok().map(|wasm| {
        let mut beside = wasm.clone().into_os_string();
        beside.push(".sig");
        PathBuf::from(beside)
    });
    let [grant, config] = [SUFFIXES[1], SUFFIXES[2]]
        .map(|suffix| image.side_files.join(format!("{}{suffix}", image.name)));
    Ok(DriverFiles {
        stem: image.name.clone(),
        is_image: true,
        wasm,
        grant: existing(grant)?,
        config: existing(config)?,
        signature: signature.map(existing).transpose()?.flatten(),
    })
}

/// Follows links: a mounted ConfigMap is a directory of them. None: there is no such file.
fn stamp(path: &Path) -> io::Result<Option<Stamp>> {
    let Some(found) = file::metadata(path)?.filter(std::fs::Metadata::is_file) else {
        return Ok(None);
    };
    let changed = [found.ctime(), found.ctime_nsec()];
    Ok(Some((
        found.dev(),
        found.ino(),
        found.size(),
        found.modified()?,
        changed,
    )))
}

/// The files of a driver in the drivers directory.
fn files(directory: &Path, stem: &str) -> io::Result<DriverFiles> {
    let [wasm, grant, config, signature] =
        SUFFIXES.map(|suffix| directory.join(format!("{stem}{suffix}")));
    Ok(DriverFiles {
        stem: stem.to_owned(),
        is_image: false,
        wasm: Ok(wasm),
        grant: existing(grant)?,
        config: existing(config)?,
        signature: existing(signature)?,
    })
}

/// The path, if it leads to a regular file.
fn existing(path: PathBuf) -> io::Result<Option<PathBuf>> {
    Ok(stamp(&path)?.map(|_| path))
}

#[cfg(test)]
mod tests;
