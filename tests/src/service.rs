//! A service manager for a daemon: it receives the daemon's notifications, and has a store for its file descriptors, as systemd does.

use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// File descriptors by name, in the order of their names.
type Store = Arc<Mutex<BTreeMap<String, OwnedFd>>>;

pub(crate) struct ServiceManager {
    /// Socket for the daemon's notifications.
    pub(crate) socket: PathBuf,
    notifications: tokio::sync::Mutex<mpsc::UnboundedReceiver<String>>,
    store: Store,
    reader: JoinHandle<()>,
}

impl ServiceManager {
    pub(crate) fn listen(path: &Path) -> Self {
        // Of a daemon that was on this root before.
        let _ = std::fs::remove_file(path);
        let socket = UnixDatagram::bind(path).expect("bind the notify socket");
        let (sender, notifications) = mpsc::unbounded_channel();
        let store = Store::default();
        // At once: a datagram socket has room for few.
        let reader = tokio::spawn(read(socket, sender, store.clone()));
        Self {
            socket: path.to_owned(),
            notifications: notifications.into(),
            store,
            reader,
        }
    }

    /// The next notification that is not about the store.
    pub(crate) async fn notification(&self) -> String {
        self.notifications
            .lock()
            .await
            .recv()
            .await
            .expect("the reader runs")
    }

    /// Returns the file descriptors that the daemon gets at its next start.
    pub(crate) fn stored(&self) -> (Vec<String>, Vec<OwnedFd>) {
        let store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        let copy = |(name, fd): (&String, &OwnedFd)| {
            (
                name.clone(),
                fd.try_clone().expect("a descriptor is copied"),
            )
        };
        store.iter().map(copy).unzip()
    }
}

impl Drop for ServiceManager {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

async fn read(socket: UnixDatagram, sender: mpsc::UnboundedSender<String>, store: Store) {
    loop {
        let received = socket
            .async_io(Interest::READABLE, || receive(&socket))
            .await;
        let (text, descriptor) = received.expect("a datagram is received");
        let name = text
            .lines()
            .find_map(|line| line.strip_prefix("FDNAME="))
            .map(str::to_owned);
        let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
        match (name, descriptor) {
            (Some(name), Some(descriptor)) if text.contains("FDSTORE=1") => {
                drop(store.insert(name, descriptor))
            }
            (Some(name), None) if text.contains("FDSTOREREMOVE=1") => drop(store.remove(&name)),
            // The test may have no more interest.
            _ => drop(sender.send(text.trim().to_owned())),
        }
    }
}

fn receive(socket: &UnixDatagram) -> std::io::Result<(String, Option<OwnedFd>)> {
    let (mut buffer, mut space) = (
        [0; 512],
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))],
    );
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let read = recvmsg(
        socket.as_fd(),
        &mut [IoSliceMut::new(&mut buffer)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let descriptor = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok((
        String::from_utf8_lossy(&buffer[..read.bytes]).into_owned(),
        descriptor,
    ))
}
