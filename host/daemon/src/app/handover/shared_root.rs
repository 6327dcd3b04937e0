//! The files that the instances on one root share: the lock of the instance that serves, which the kernel releases at its end, the order
//! in which they came, and their sockets.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use tokio::net::UnixStream;

use super::order::Order;
use crate::app::handover::INSTANCES_MAX;
use nodedock_base::error::chain;
use nodedock_base::file;
use nodedock_base::paths::{INSTANCE_PROBES, Paths};
use nodedock_model::Uid;

/// Bytes of the order's file: each UID has 128 at most.
const ORDER_BYTES_MAX: u64 = (INSTANCES_MAX as u64) * 256;

pub(super) struct SharedRoot {
    pub(super) paths: Paths,
    /// This instance.
    pub(super) instance: Uid,
}

/// The file is locked until it is dropped.
pub(super) type Lease = File;

impl SharedRoot {
    /// Takes the lease if it is free.
    pub(super) fn try_lock(&self) -> Result<Option<Lease>> {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600);
        let path = &self.paths.instance_lock;
        let file = options
            .open(path)
            .with_context(|| format!("open {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("lock {}", path.display()))
            }
        }
    }

    /// Adds this instance to the order, and returns that. The caller owns the lease.
    pub(super) fn record(&self) -> Order {
        let path = &self.paths.instances;
        let mut order = read_order(path).unwrap_or_else(|error| {
            tracing::warn!(
                error = chain(&error),
                "the order of instances is not known; it begins again"
            );
            Order::default()
        });
        let before = order.clone();
        order.add(&self.instance);
        if order != before
            && let Err(error) = file::replace(path, order.text().as_bytes())
        {
            // It costs one needless handover.
            tracing::warn!(
                error = chain(&error),
                "the order of instances cannot be stored"
            );
        }
        order
    }

    /// Removes the sockets for probes of instances that have ended: those of the others accept.
    pub(super) async fn remove_abandoned_sockets(&self) {
        let own = self.paths.probes_of(&self.instance);
        let Some(Ok(entries)) = own.parent().map(std::fs::read_dir) else {
            return;
        };
        // no error: the next instance that serves looks again
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let is_probe = name.starts_with(INSTANCE_PROBES) && name.ends_with(".sock");
            if is_probe && path != own && is_abandoned(&path).await {
                // The next instance that serves retries.
                let _ = std::fs::remove_file(&path);
            }
        }
    }
}

async fn is_abandoned(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    // no error: a socket that cannot be looked at stays
    let is_socket =
        std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
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

#[cfg(test)]
mod tests {
    use super::super::tests::root;
    use super::*;

    #[test]
    fn lease_is_exclusive_until_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (
            root(directory.path(), "one"),
            root(directory.path(), "other"),
        );
        let lease = one.try_lock().unwrap().unwrap();
        assert!(other.try_lock().unwrap().is_none() && one.try_lock().unwrap().is_none());
        drop(lease);
        assert!(other.try_lock().unwrap().is_some());
    }

    #[test]
    fn damaged_order_file_is_reset() {
        let directory = tempfile::tempdir().unwrap();
        root(directory.path(), "one").record();
        let order = root(directory.path(), "other").record();
        assert_eq!(order.text(), "one\nother\n");
        let file = Paths::below(directory.path()).instances;
        assert_eq!(std::fs::read_to_string(&file).unwrap(), order.text());
        std::fs::write(&file, [0xff, 0xfe, b'\n']).unwrap();
        assert_eq!(root(directory.path(), "other").record().text(), "other\n");
    }

    #[tokio::test]
    async fn only_abandoned_sockets_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let root = root(directory.path(), "one");
        let socket = |name: &str| root.paths.probes_of(&Uid::new(name).unwrap());
        let _living = std::os::unix::net::UnixListener::bind(socket("living")).unwrap();
        for gone in ["one", "gone"] {
            drop(std::os::unix::net::UnixListener::bind(socket(gone)).unwrap());
        }
        std::fs::write(socket("file"), "precious").unwrap();
        root.remove_abandoned_sockets().await;
        let there = ["living", "one", "gone", "file"].map(|name| socket(name).exists());
        assert_eq!(there, [true, true, false, true]);
    }
}
