//! The kernel's device events: uevents from netlink, and nodes that come and go in `/dev`.
//!
//! In a network namespace of its own a process gets no uevents; `/dev` and the drivers' timers remain.

use std::io;
use std::path::{Path, PathBuf};

use bytes::BytesMut;
use kobject_uevent::UEvent;
use netlink_sys::{
    AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_KOBJECT_UEVENT,
};
use notify::event::EventKind;
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::broadcast;

use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;

/// Number of events by which an inventory poller may lag; beyond that it looks at everything.
const EVENTS_BEHIND_MAX: usize = 1024;
/// The kernel's own multicast group; udev has another.
const KERNEL_GROUP: u32 = 1;
/// Bursts come when a bus is scanned: a buffer for some thousand events.
const RECEIVE_BUFFER: i32 = 1 << 20;

/// A device changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelEvent {
    Device {
        /// Such as `pci`, `net`, `block`.
        subsystem: String,
        /// Its directory, relative to `/sys`.
        path: String,
    },
    /// A node came or went in `/dev`; which subsystem it belongs to is not known.
    Node,
    /// Events were lost: anything may have changed.
    Lost,
}

/// The channel of kernel events.
#[derive(Clone)]
pub struct KernelEvents(broadcast::Sender<KernelEvent>);

impl Default for KernelEvents {
    fn default() -> Self {
        Self(broadcast::channel(EVENTS_BEHIND_MAX).0)
    }
}

impl KernelEvents {
    pub fn listen(&self) -> broadcast::Receiver<KernelEvent> {
        self.0.subscribe()
    }

    fn publish(&self, event: KernelEvent) {
        // Without a listener the event is not needed.
        let _ = self.0.send(event);
    }
}

/// Reads uevents until the tasks stop. Without permission for the socket it logs that once and ends.
pub async fn read_uevents(tasks: Tasks, events: KernelEvents) {
    let socket = match open() {
        Ok(socket) => socket,
        Err(error) => {
            tracing::warn!(
                error = chain(&error),
                "no kernel events, devices are looked for on timers"
            );
            return;
        }
    };
    let stopped = tasks.stopped();
    tokio::pin!(stopped);
    loop {
        let mut buffer = BytesMut::with_capacity(64 << 10);
        tokio::select! {
            // What is not read is looked for at the next start.
            () = &mut stopped => return,
            // A datagram is received whole or not at all.
            received = socket.recv_from(&mut buffer) => match received {
                // Only the kernel (port 0) is trusted: any process may send to the group's address.
                Ok(sender) if sender.port_number() != 0 => {}
                Ok(_) => parse(&buffer).into_iter().for_each(|event| events.publish(event)),
                // ENOBUFS: the kernel dropped events because we were slow.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) => {
                    events.publish(KernelEvent::Lost);
                }
                Err(error) => {
                    tracing::warn!(error = chain(&error), "kernel events ended, devices are looked for on timers");
                    return;
                }
            }
        }
    }
}

fn open() -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(NETLINK_KOBJECT_UEVENT)?;
    // A smaller buffer loses events earlier, and lost events are noticed.
    let _ = socket.socket_ref().set_rx_buf_sz(RECEIVE_BUFFER);
    socket
        .socket_mut()
        .bind(&SocketAddr::new(0, KERNEL_GROUP))?;
    Ok(socket)
}

fn parse(datagram: &[u8]) -> Option<KernelEvent> {
    let event = UEvent::from_netlink_packet(datagram).ok()?;
    let path = event
        .devpath
        .to_string_lossy()
        .trim_start_matches('/')
        .to_owned();
    Some(KernelEvent::Device {
        subsystem: event.subsystem,
        path,
    })
}

/// Publishes events of nodes that come and go in `/dev` until the tasks stop.
pub async fn watch_nodes(dev: PathBuf, tasks: Tasks, events: KernelEvents) {
    match watch_directory(&dev, events) {
        // The watch ends when it is dropped.
        Ok(_watcher) => tasks.stopped().await,
        Err(error) => {
            tracing::warn!(directory = %dev.display(), error = chain(&error), "no watch on device nodes")
        }
    }
}

fn watch_directory(dev: &Path, events: KernelEvents) -> notify::Result<RecommendedWatcher> {
    let mut watcher =
        notify::recommended_watcher(move |event: notify::Result<notify::Event>| match event {
            Ok(event) if !matches!(event.kind, EventKind::Create(_) | EventKind::Remove(_)) => {}
            _ => events.publish(KernelEvent::Node),
        })?;
    watcher.watch(dev, RecursiveMode::NonRecursive)?;
    Ok(watcher)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uevent_gives_subsystem_and_path() {
        let datagram =
            b"add@/devices/virtual/block/loop9\0ACTION=add\0DEVPATH=/devices/virtual/block/loop9\0\
            SUBSYSTEM=block\0MAJOR=7\0MINOR=9\0DEVNAME=loop9\0SEQNUM=4242\0";
        let path = "devices/virtual/block/loop9".to_owned();
        assert_eq!(
            parse(datagram),
            Some(KernelEvent::Device {
                subsystem: "block".to_owned(),
                path
            })
        );
    }

    #[test]
    fn datagrams_other_than_uevents_are_dropped() {
        for bad in [
            &b""[..],
            b"libudev\0\xfe\xed\xca\xfe",
            b"add@",
            b"\xff\xff\xff",
            b"add@/x\0ACTION=\0",
        ] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }

    #[tokio::test]
    async fn a_node_that_appears_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let events = KernelEvents::default();
        let mut reported = events.listen();
        let _watcher = watch_directory(dir.path(), events).unwrap();
        std::fs::write(dir.path().join("x"), "").unwrap();
        assert_eq!(reported.recv().await, Ok(KernelEvent::Node));
    }
}
