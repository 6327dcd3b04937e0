//! Maps devices to spec files, over all directories that container runtimes read. Cached; new and changed files are read when a
//! directory has changed, or when the watch reports a file.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::Metadata;
use std::io::{self, Read};
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Deserialize;

use super::identity::{DAEMON_OPENING, MARK};
use super::stamp::{CLOCK_TICK_MAX, Known, Stamp, is_spec_name, open_plain};
use nodedock_base::file;
use nodedock_model::{DeviceNode, NetDevice};

/// Bytes of a file that are read; a larger file is skipped.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// A directory that changes permanently is read again after this multiple of the time of a read; one that is read faster than the second
/// constant is read at once.
const REST: u32 = 20;
const QUICK: Duration = Duration::from_millis(1);

/// Another program's file with a device of the same qualified name: runtimes would refuse both, or use the other one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collision {
    /// `vendor/class=device`.
    pub device: String,
    /// The file with that device.
    pub file: PathBuf,
}

/// Content of changed files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Touched {
    /// Qualified names of the devices that other programs' files have, or had before.
    pub devices: BTreeSet<String>,
    /// Names of this daemon's files.
    pub ours: Vec<String>,
}

pub(super) struct Catalog {
    /// Directories by ascending priority: of two files with a device, runtimes use the one in the later directory.
    directories: Vec<PathBuf>,
    /// The directory that the daemon writes.
    own: usize,
    /// The beginning of every file of this daemon, and of no other file.
    pub(super) mark: String,
    /// Files that this process wrote or compared, by name.
    pub(super) known: Mutex<HashMap<String, Known>>,
    state: Mutex<CatalogIndex>,
    /// One reader at a time; waiting callers use its result.
    reading: Mutex<()>,
    /// Number of reads that began.
    begun: AtomicU64,
    /// The last read, by that number, that completed without an error.
    done: AtomicU64,
}

/// The time of a request, which any later read satisfies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment(u64);

#[derive(Default)]
struct CatalogIndex {
    seen: HashMap<usize, DirectoryRead>,
    /// Set during a change of the daemon's directory: whether the directory was unchanged since its read when the change began. Stamps are
    /// meaningless meanwhile.
    changing: Option<bool>,
    /// Files by directory and name.
    files: BTreeMap<(usize, String), Entry>,
    devices: HashMap<String, BTreeSet<(usize, String)>>,
}

/// A directory at the time of its read.
#[derive(Clone, Copy)]
struct DirectoryRead {
    /// `None`: it did not exist.
    stamp: Option<Stamp>,
    /// True if a later change certainly changes the stamp.
    settled: bool,
    at: Instant,
    took: Duration,
}

#[derive(Default)]
struct Entry {
    /// `None`: must be read again, because a change may not be visible.
    stamp: Option<Stamp>,
    devices: Vec<String>,
    /// Device nodes and network interfaces that each of the devices gives to a container.
    given: Vec<Given>,
    ours: bool,
}

/// Device nodes and network interfaces that a CDI device of another program gives to a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Given {
    pub device_nodes: Vec<DeviceNode>,
    pub net_devices: Vec<NetDevice>,
}

/// The fields of a spec that name its devices, and what these give.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Names {
    kind: String,
    #[serde(default)]
    devices: Vec<Name>,
    container_edits: Option<Edits>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Name {
    name: String,
    container_edits: Option<Edits>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Edits {
    device_nodes: Option<Vec<Node>>,
    net_devices: Option<Vec<Interface>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    path: String,
    host_path: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Interface {
    host_interface_name: String,
    name: Option<String>,
}

impl Given {
    /// `all`: of every device of a spec.
    fn of(all: Option<&Edits>, own: Option<&Edits>) -> Self {
        let edits = all.into_iter().chain(own);
        let nodes = edits
            .clone()
            .flat_map(|edits| edits.device_nodes.iter().flatten());
        let interfaces = edits.flat_map(|edits| edits.net_devices.iter().flatten());
        Self {
            // The numbers in a spec are optional, and those of the node count.
            device_nodes: nodes
                .map(|node| DeviceNode {
                    host_path: node.host_path.clone(),
                    ..DeviceNode::at(&node.path)
                })
                .collect(),
            net_devices: interfaces
                .map(|found| NetDevice {
                    host_interface: found.host_interface_name.clone(),
                    container_interface: found
                        .name
                        .clone()
                        .unwrap_or_else(|| found.host_interface_name.clone()),
                })
                .collect(),
        }
    }
}

impl Catalog {
    /// `own` must exist, and is the last of the directories if it is not one of them.
    pub(super) fn new(own: &Path, directories: &[PathBuf], mark: String) -> Self {
        let mut directories = directories.to_vec();
        let is_own = |directory: &PathBuf| {
            // no error: a directory that does not exist yet is another one
            let found = directory.metadata().ok().zip(own.metadata().ok());
            found.is_some_and(|(found, own)| is_same(&found, &own))
        };
        let at = directories.iter().position(is_own).unwrap_or_else(|| {
            directories.push(own.to_owned());
            directories.len() - 1
        });
        own.clone_into(&mut directories[at]);
        Self {
            directories,
            own: at,
            mark,
            known: Mutex::default(),
            state: Mutex::default(),
            reading: Mutex::default(),
            begun: AtomicU64::new(0),
            done: AtomicU64::new(0),
        }
    }

    /// Returns whether a file with this text, or its beginning, belongs to this daemon: it has the mark, or what damage left of it. The mark
    /// of another daemon differs.
    pub(super) fn is_ours(&self, text: &[u8]) -> bool {
        let beginning = &text[..text.len().min(self.mark.len())];
        let damaged = beginning.starts_with(MARK.as_bytes())
            && !beginning.starts_with(DAEMON_OPENING.as_bytes());
        let cut = self.mark.as_bytes().starts_with(beginning) && beginning.len() > MARK.len();
        beginning == self.mark.as_bytes() || damaged || cut
    }

    /// Returns whether the directories are unchanged since they were read, by a `stat` of each.
    pub(super) fn is_fresh(&self) -> bool {
        // no error: then a read of the directories reports it
        let Ok(own) = self.found(self.own) else {
            return false;
        };
        (0..self.directories.len()).all(|directory| {
            if let (true, Some(unchanged)) = (directory == self.own, self.state.lock().changing) {
                return unchanged;
            }
            let now = self.stamp_beside(directory, own.as_ref());
            now.is_ok_and(|now| self.state.lock().is_fresh(directory, now))
        })
    }

    /// Reads new and changed files: in directories that changed, or (`all`) in all of them, since a file that is altered in place
    /// does not change its directory. Blocks.
    ///
    /// Of many concurrent callers few read: a read that began after `requested` satisfies the caller.
    pub(super) fn refresh(&self, requested: Moment, all: bool) -> Result<(), (PathBuf, io::Error)> {
        let _alone = self.reading.lock();
        if !all && self.done.load(Ordering::Relaxed) > requested.0 {
            return Ok(());
        }
        let reading = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        for directory in 0..self.directories.len() {
            self.refresh_directory(directory, all)
                .map_err(|error| (self.directories[directory].clone(), error))?;
        }
        self.done.store(reading, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn now(&self) -> Moment {
        Moment(self.begun.load(Ordering::SeqCst))
    }

    fn refresh_directory(&self, directory: usize, all: bool) -> io::Result<()> {
        let (stamp, at) = (self.stamp(directory)?, Instant::now());
        if !all && self.state.lock().is_fresh(directory, stamp) {
            return Ok(());
        }
        let listed = if stamp.is_some() {
            self.list(directory)?
        } else {
            BTreeMap::new()
        };
        let changed = self.state.lock().changed(directory, &listed);
        let read: io::Result<Vec<_>> = changed
            .into_iter()
            .map(|name| Ok((self.read(directory, &name)?, name)))
            .collect();
        let read = read?;
        let settled = stamp.is_none_or(|stamp| stamp.is_settled_at(at));
        let mut state = self.state.lock();
        state.keep_listed(directory, &listed);
        read.into_iter()
            .for_each(|(entry, name)| state.put(directory, name, entry));
        state.seen.insert(
            directory,
            DirectoryRead {
                stamp,
                settled,
                at,
                took: at.elapsed(),
            },
        );
        Ok(())
    }

    /// Reads files of the daemon's directory again, regardless of their stamps. Blocks.
    pub(super) fn touched(&self, names: &[String]) -> Touched {
        let _alone = self.reading.lock();
        let mut touched = Touched::default();
        for name in names {
            let path = self.directories[self.own].join(name);
            let looked = file::symlink_metadata(&path).and_then(|found| match found {
                Some(_) => Ok((true, self.read(self.own, name)?)),
                None => Ok((false, Entry::default())),
            });
            let (there, entry) = match looked {
                Ok(looked) => looked,
                Err(error) => {
                    // The next check of all files reads it again.
                    tracing::warn!(file = %path.display(), %error, "a cdi file cannot be read");
                    continue;
                }
            };
            touched.devices.extend(entry.devices.iter().cloned());
            touched.ours.extend(entry.ours.then(|| name.clone()));
            let mut state = self.state.lock();
            touched.devices.extend(
                state
                    .take(self.own, name)
                    .map(|entry| entry.devices)
                    .unwrap_or_default(),
            );
            if there {
                state.put(self.own, name.clone(), entry);
            }
        }
        touched
    }

    /// Must be called before a change of the daemon's directory. The daemon's own changes cause no read, neither then nor meanwhile.
    pub(super) fn begin_change(&self) {
        let now = self.stamp(self.own);
        let mut state = self.state.lock();
        state.changing = Some(
            now.is_ok_and(|now| state.is_fresh(self.own, now) || state.is_recent(self.own, now)),
        );
    }

    /// Must be called after the change. If another program changed the directory before it, the directory is read here: a read between the
    /// daemon's changes would be outdated at the next one. A change of another program during the daemon's change is not visible in the
    /// stamp; only a list would show it, and one list for every prepare is the cost that this saves. The watch reports such a change
    /// (`touched`), possibly after the response to a claim that should have been refused. Blocks.
    pub(super) fn end_change(&self) {
        let after = self.stamp(self.own);
        {
            let mut state = self.state.lock();
            let unchanged = state.changing == Some(true);
            state.changing = None;
            match (after, state.seen.get_mut(&self.own)) {
                (Ok(after), Some(seen)) if unchanged => {
                    seen.stamp = after;
                    return;
                }
                _ => {}
            }
        }
        // The next read fails as well, and reports the error.
        self.refresh(self.now(), false).ok();
    }

    /// Returns the other programs' files that collide with this daemon's devices, the first of each, by the last read.
    pub(super) fn collisions(&self, qualified: &[String]) -> Vec<Collision> {
        let state = self.state.lock();
        let collisions = qualified.iter().filter_map(|device| {
            // The daemon's directory overrides the directories before it.
            let mut files = state.devices.get(device)?.iter();
            let (directory, name) = files.find(|(directory, _)| *directory >= self.own)?;
            Some(Collision {
                device: device.clone(),
                file: self.directories[*directory].join(name),
            })
        });
        collisions.collect()
    }

    /// Returns the names that are in no file of other programs, by the last read.
    pub(super) fn missing(&self, qualified: &[String]) -> Vec<String> {
        let state = self.state.lock();
        qualified
            .iter()
            .filter(|name| !state.devices.contains_key(*name))
            .cloned()
            .collect()
    }

    /// Returns what a CDI device gives, by every file of other programs that has it; by the last read.
    pub(super) fn given(&self, qualified: &str) -> Vec<Given> {
        let state = self.state.lock();
        let files = state.devices.get(qualified).into_iter().flatten();
        let entries = files.filter_map(|file| state.files.get(file));
        entries
            .flat_map(|entry| {
                let named = entry
                    .devices
                    .iter()
                    .zip(&entry.given)
                    .filter(|(name, _)| *name == qualified);
                named.map(|(_, given)| given.clone()).collect::<Vec<_>>()
            })
            .collect()
    }

    /// Returns the names of this daemon's files that this process did not write and did not compare yet.
    pub(super) fn ours(&self) -> Vec<String> {
        let state = self.state.lock();
        let ours = state
            .files
            .iter()
            .filter(|((directory, _), entry)| *directory == self.own && entry.ours);
        ours.map(|((_, name), _)| name.clone()).collect()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.state
            .lock()
            .files
            .contains_key(&(self.own, name.to_owned()))
    }

    /// `None`: the directory does not exist, or is the daemon's own under another name.
    fn stamp(&self, directory: usize) -> io::Result<Option<Stamp>> {
        let own = self.found(self.own);
        if directory == self.own {
            return Ok(own?.as_ref().map(Stamp::of));
        }
        // no error: the stamp of the daemon's own directory reports it
        self.stamp_beside(directory, own.unwrap_or(None).as_ref())
    }

    /// The same, if the metadata of the daemon's own directory are known.
    fn stamp_beside(&self, directory: usize, own: Option<&Metadata>) -> io::Result<Option<Stamp>> {
        if directory == self.own {
            return Ok(own.map(Stamp::of));
        }
        let found = self.found(directory)?;
        let other = found.filter(|found| !own.is_some_and(|own| is_same(found, own)));
        Ok(other.as_ref().map(Stamp::of))
    }

    /// The metadata of a directory. `None`: it does not exist.
    fn found(&self, directory: usize) -> io::Result<Option<Metadata>> {
        match std::fs::metadata(&self.directories[directory]) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            found => found.map(Some),
        }
    }

    /// Returns the specs of a directory that may belong to other programs.
    fn is_known(&self, name: &str, entry: &std::fs::DirEntry) -> bool {
        let known = self.known.lock();
        let known = known.get(name);
        known.is_some_and(|known| known.stamp.inode == entry.ino())
    }

    fn list(&self, directory: usize) -> io::Result<BTreeMap<String, Stamp>> {
        let mut listed = BTreeMap::new();
        for entry in std::fs::read_dir(&self.directories[directory])? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if !is_spec_name(&name) || (directory == self.own && self.is_known(&name, &entry)) {
                continue;
            }
            // A file that was removed meanwhile does not count.
            if let Some(metadata) = file::symlink_metadata(&entry.path())? {
                listed.insert(name, Stamp::of(&metadata));
            }
        }
        Ok(listed)
    }

    /// A file that is gone, that this process may not read or that is no spec has no devices: a runtime cannot read it either.
    fn read(&self, directory: usize, name: &str) -> io::Result<Entry> {
        let path = self.directories[directory].join(name);
        let stamp = file::symlink_metadata(&path)?.map(|metadata| Stamp::of(&metadata));
        let stamp = stamp.filter(Stamp::is_settled);
        let text = match read_plain(&path) {
            Err(error) if is_unreadable(&error) => String::new(),
            text => text?.unwrap_or_default(),
        };
        if directory == self.own && self.is_ours(text.as_bytes()) {
            return Ok(Entry {
                stamp,
                ours: true,
                ..Entry::default()
            });
        }
        let names = serde_saphyr::from_str::<Names>(&text).unwrap_or_default();
        let given = names.devices.iter().map(|device| {
            Given::of(
                names.container_edits.as_ref(),
                device.container_edits.as_ref(),
            )
        });
        let (devices, given) = (
            names
                .devices
                .iter()
                .map(|device| format!("{}={}", names.kind, device.name))
                .collect(),
            given.collect(),
        );
        Ok(Entry {
            stamp,
            devices,
            given,
            ours: false,
        })
    }
}

impl CatalogIndex {
    fn is_fresh(&self, directory: usize, now: Option<Stamp>) -> bool {
        let Some(seen) = self.seen.get(&directory).filter(|seen| seen.stamp == now) else {
            return false;
        };
        // The watch reports what a read misses within a tick of the file system's clock.
        seen.settled || (seen.took > QUICK && seen.at.elapsed() < seen.took * REST)
    }

    /// Returns whether a directory was read within a tick of the file system's clock, without a visible change. Under load the last
    /// change is usually the daemon's own and recent, and does not invalidate the read before it.
    fn is_recent(&self, directory: usize, now: Option<Stamp>) -> bool {
        self.seen
            .get(&directory)
            .is_some_and(|seen| seen.stamp == now && seen.at.elapsed() < CLOCK_TICK_MAX)
    }

    fn changed(&self, directory: usize, listed: &BTreeMap<String, Stamp>) -> Vec<String> {
        let changed = listed.iter().filter(|(name, stamp)| {
            let known = self.files.get(&(directory, (*name).clone()));
            known.is_none_or(|entry| entry.stamp != Some(**stamp))
        });
        changed.map(|(name, _)| name.clone()).collect()
    }

    fn keep_listed(&mut self, directory: usize, listed: &BTreeMap<String, Stamp>) {
        let from = (directory, String::new());
        let of_directory = self
            .files
            .range(from..)
            .take_while(|((of, _), _)| *of == directory);
        let gone = of_directory.filter(|((_, name), _)| !listed.contains_key(name));
        let gone: Vec<_> = gone.map(|((_, name), _)| name.clone()).collect();
        gone.iter()
            .for_each(|name| drop(self.take(directory, name)));
    }

    fn put(&mut self, directory: usize, name: String, entry: Entry) {
        self.take(directory, &name);
        for device in &entry.devices {
            self.devices
                .entry(device.clone())
                .or_default()
                .insert((directory, name.clone()));
        }
        self.files.insert((directory, name), entry);
    }

    fn take(&mut self, directory: usize, name: &str) -> Option<Entry> {
        let key = (directory, name.to_owned());
        let entry = self.files.remove(&key)?;
        for device in &entry.devices {
            let Some(files) = self.devices.get_mut(device) else {
                continue;
            };
            files.remove(&key);
            if files.is_empty() {
                self.devices.remove(device);
            }
        }
        Some(entry)
    }
}

fn is_same(found: &Metadata, other: &Metadata) -> bool {
    (other.dev(), other.ino()) == (found.dev(), found.ino())
}

/// `None` for what is no plain file, or too large to be a spec.
fn read_plain(path: &Path) -> io::Result<Option<String>> {
    let Some(file) = open_plain(path)? else {
        return Ok(None);
    };
    if file.metadata()?.len() > FILE_BYTES_MAX {
        return Ok(None);
    }
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(Some(text))
}

fn is_unreadable(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, NotFound, PermissionDenied};
    matches!(error.kind(), NotFound | PermissionDenied | InvalidData)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn catalog(own: &Path, directories: &[PathBuf]) -> Catalog {
        Catalog::new(own, directories, "# test".to_owned())
    }

    #[test]
    fn earlier_callers_share_one_read() {
        let directory = tempfile::tempdir().unwrap();
        let catalog = catalog(directory.path(), &[]);
        let device = ["v/c=a".to_owned()];
        let (early, late) = (catalog.now(), catalog.now());
        catalog.refresh(early, false).unwrap();
        let spec = r#"{"kind": "v/c", "devices": [{"name": "a"}]}"#;
        std::fs::write(directory.path().join("a.json"), spec).unwrap();
        catalog.refresh(late, false).unwrap();
        assert_eq!(
            catalog.missing(&device),
            device,
            "it was not there when they requested"
        );
        catalog.refresh(catalog.now(), false).unwrap();
        assert_eq!(catalog.missing(&device), [] as [String; 0]);
    }

    #[test]
    fn failed_read_satisfies_no_caller() {
        let directory = tempfile::tempdir().unwrap();
        let (own, other) = (directory.path().join("own"), directory.path().join("other"));
        std::fs::create_dir(&own).unwrap();
        std::fs::write(&other, "no directory").unwrap();
        let catalog = catalog(&own, &[other.clone(), own.clone()]);
        let (early, late) = (catalog.now(), catalog.now());
        assert_eq!(catalog.refresh(early, false).unwrap_err().0, other);
        assert_eq!(catalog.refresh(late, false).unwrap_err().0, other);
    }

    /// A catalog of one directory that was read long after its last change.
    fn read_at_rest(directory: &Path) -> Catalog {
        let catalog = catalog(directory, &[]);
        catalog.refresh(catalog.now(), false).unwrap();
        catalog
            .state
            .lock()
            .seen
            .get_mut(&catalog.own)
            .unwrap()
            .settled = true;
        catalog
    }

    fn readings(catalog: &Catalog) -> u64 {
        catalog.begun.load(Ordering::SeqCst)
    }

    #[test]
    fn own_changes_cause_no_read() {
        let directory = tempfile::tempdir().unwrap();
        let catalog = read_at_rest(directory.path());
        for name in ["a.json", "b.json"] {
            catalog.begin_change();
            std::fs::write(directory.path().join(name), "{}").unwrap();
            assert!(catalog.is_fresh());
            catalog.end_change();
            assert!(catalog.is_fresh());
        }
        assert_eq!(readings(&catalog), 1);
    }

    #[test]
    fn watch_finds_file_added_during_change() {
        let directory = tempfile::tempdir().unwrap();
        let catalog = read_at_rest(directory.path());
        let device = ["v/c=a".to_owned()];
        catalog.begin_change();
        std::fs::write(directory.path().join("ours.json"), "{}").unwrap();
        let spec = r#"{"kind": "v/c", "devices": [{"name": "a"}]}"#;
        std::fs::write(directory.path().join("a.json"), spec).unwrap();
        catalog.end_change();
        assert_eq!(
            (catalog.is_fresh(), catalog.collisions(&device).len()),
            (true, 0)
        );
        catalog.touched(&["a.json".to_owned()]);
        assert_eq!(
            (catalog.collisions(&device).len(), readings(&catalog)),
            (1, 1)
        );
    }

    #[test]
    fn earlier_foreign_change_forces_a_read() {
        let directory = tempfile::tempdir().unwrap();
        let catalog = read_at_rest(directory.path());
        let device = ["v/c=a".to_owned()];
        std::fs::create_dir(directory.path().join("changed by others")).unwrap();
        // It may have been created within the tick of the read.
        catalog.state.lock().seen.clear();
        catalog.begin_change();
        assert!(!catalog.is_fresh());
        let spec = r#"{"kind": "v/c", "devices": [{"name": "a"}]}"#;
        std::fs::write(directory.path().join("a.json"), spec).unwrap();
        catalog.end_change();
        assert_eq!((readings(&catalog), catalog.missing(&device).len()), (2, 0));
        // Under load this read satisfies the next change.
        catalog.begin_change();
        assert!(catalog.is_fresh());
        catalog.end_change();
        assert_eq!(readings(&catalog), 2);
    }
}
