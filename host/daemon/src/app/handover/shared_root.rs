//! The one place on a root that instances take in turn: a lock that the kernel gives back when its holder dies, the order in which
//! they came, and the socket on which the holder is asked.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::FlockOperation;
use tokio::net::UnixStream;

use super::order::Order;
use crate::config::{INSTANCE_PROBES, Paths};
use nodedock_base::error::chain;
use nodedock_model::{Uid, limit};

/// Bytes of the order's file: each UID has 128 at most.
const ORDER_BYTES_MAX: u64 = (limit::INSTANCES_MAX as u64) * 256;

pub(super) struct Place {
    pub(super) instance: Uid,
    lock: PathBuf,
    order: PathBuf,
    /// Where the holder is asked.
    pub(super) door: PathBuf,
    probes: PathBuf,
}

/// The place is taken while this lives.
#[derive(Debug)]
pub(super) struct Lease {
    _locked: File,
}

impl Place {
    pub(super) fn new(paths: &Paths, instance: Uid) -> Self {
        Self {
            lock: paths.instance_lock.clone(),
            order: paths.instances.clone(),
            door: paths.handover.clone(),
            probes: paths.probes_of(&instance),
            instance,
        }
    }

    pub(super) fn lock_path(&self) -> &Path {
        &self.lock
    }

    /// Takes the place if it is free.
    pub(super) fn try_take(&self) -> Result<Option<Lease>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&self.lock).with_context(|| format!("open {}", self.lock.display()))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Lease { _locked: file })),
            Err(error) if error == rustix::io::Errno::WOULDBLOCK => Ok(None),
            Err(error) => {
                Err(io::Error::from(error)).with_context(|| format!("lock {}", self.lock.display()))
            }
        }
    }

    /// Notes that this instance serves; the order with it. Only the holder calls this.
    pub(super) fn note(&self) -> Order {
        let mut order = read_order(&self.order).unwrap_or_else(|error| {
            tracing::warn!(error = chain(&error), "the order of instances is not known; it begins anew");
            Order::default()
        });
        let before = order.clone();
        order.note(&self.instance);
        if order != before
            && let Err(error) = write_order(&self.order, &order)
        {
            // It costs a hand-over too many.
            tracing::warn!(error = chain(&error), "the order of instances cannot be kept");
        }
        order
    }

    /// Removes the probes' sockets of instances that are gone: those of the living accept.
    pub(super) async fn sweep(&self) {
        let Some(folder) = self.probes.parent() else { return };
        let Ok(entries) = std::fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let is_probe = name.strip_prefix(INSTANCE_PROBES).is_some_and(|rest| rest.ends_with(".sock"));
            if is_probe && entry.path() != self.probes && is_abandoned(&entry.path()).await {
                // One that is left is looked at by the next holder.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

async fn is_abandoned(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let connected = UnixStream::connect(path).await;
    is_socket && connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

fn read_order(path: &Path) -> io::Result<Order> {
    let mut text = String::new();
    match File::open(path) {
        Ok(file) => file.take(ORDER_BYTES_MAX).read_to_string(&mut text)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
        Err(error) => return Err(error),
    };
    Ok(Order::parse(&text))
}

/// Whole or not at all, also when the power fails.
fn write_order(path: &Path, order: &Order) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(order.text().as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(folder: &Path, instance: &str) -> Place {
        let paths = Paths::below(folder);
        for file in [&paths.instance_lock, &paths.handover] {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        }
        Place::new(&paths, Uid::new(instance).unwrap())
    }

    #[test]
    fn the_place_is_one_s_until_the_lease_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (place(folder.path(), "one"), place(folder.path(), "other"));
        let lease = one.try_take().unwrap().unwrap();
        assert!(other.try_take().unwrap().is_none() && one.try_take().unwrap().is_none());
        drop(lease);
        assert!(other.try_take().unwrap().is_some());
    }

    #[test]
    fn the_order_is_kept_in_a_file_and_a_damaged_one_begins_anew() {
        let folder = tempfile::tempdir().unwrap();
        place(folder.path(), "one").note();
        let order = place(folder.path(), "other").note();
        assert_eq!(order.text(), "one\nother\n");
        let file = Paths::below(folder.path()).instances;
        assert_eq!(std::fs::read_to_string(&file).unwrap(), order.text());
        std::fs::write(&file, [0xff, 0xfe, b'\n']).unwrap();
        assert_eq!(place(folder.path(), "other").note().text(), "other\n");
    }

    #[tokio::test]
    async fn sockets_of_the_living_and_what_is_no_socket_stay() {
        let folder = tempfile::tempdir().unwrap();
        let (place, paths) = (place(folder.path(), "one"), Paths::below(folder.path()));
        let socket = |name: &str| paths.probes_of(&Uid::new(name).unwrap());
        let living = std::os::unix::net::UnixListener::bind(socket("living")).unwrap();
        for gone in ["one", "gone"] {
            drop(std::os::unix::net::UnixListener::bind(socket(gone)).unwrap());
        }
        std::fs::write(socket("file"), "precious").unwrap();
        place.sweep().await;
        let there = ["living", "one", "gone", "file"].map(|name| socket(name).exists());
        assert_eq!(there, [true, true, false, true]);
        drop(living);
    }
}
