//! Instances of the daemon that share one root, as pods of a DaemonSet do in a surge update (`docs/decisions/0009-surge-updates.md`).
//!
//! One of them serves, and the others wait. The serving instance hands over to a newer one that requests it. An older instance is on standby,
//! and serves again if the newer one ends first. The instance that serves owns a lock, which the kernel releases at its end: no crash
//! leaves it locked, and no two instances serve.
//!
//! # Life of an instance
//!
//! `waits → serves → hands over → is on standby`, and `serves` again if the newer instance ends first. A file has the order of the instances. A
//! handover ends everything but the kubelet's sockets. The listening sockets are passed to the next instance as they are: a client that
//! dials meanwhile waits, and a call on a connection that is open is forwarded to the next instance. When that serves, this instance ends
//! its connections, and says so.

mod message;
mod order;
mod serving;
mod shared_root;
mod waiting;

use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::{Context, Result};

use self::message::{Connection, Message, Peer};
use self::serving::HandoverListener;
use self::shared_root::SharedRoot;
use super::{Daemon, KubeletSockets, Signals, Start};
use crate::admin::{self, Front};
use crate::config::Config;
use nodedock_base::error::chain;
use nodedock_base::socket;
use nodedock_base::tasks::Tasks;
use nodedock_model::{Uid, limit};

/// Delay before an older instance replaces one that ended: a newer one that restarts takes precedence.
const HANDOVER_PATIENCE: Duration = Duration::from_secs(1);

/// Time that the previous instance forwards calls to the one that takes over.
const HANDOVER_SERVING: Duration = Duration::from_secs(60);

/// Time that the new instance waits until the previous one has ended its connections.
const HANDOVER_ENDED: Duration = limit::DRAIN.saturating_add(Duration::from_secs(5));

/// Deadline of a message that is due at once.
const HANDOVER_MESSAGE: Duration = Duration::from_secs(5);

/// Instances in the order file: an update has two at a time, and a dropped one counts as new.
const INSTANCES_MAX: usize = 32;

struct Instance {
    config: Config,
    start: Start,
    root: SharedRoot,
    /// Answers probes about this instance, whichever instance serves.
    front: Front,
    signals: Signals,
}

/// Waits and serves in turn until a signal requests the end.
pub(super) async fn run(
    config: Config,
    start: Start,
    instance: Uid,
    signals: Signals,
) -> Result<()> {
    super::directories::prepare(&config.paths)?;
    let (front, tasks) = (Front::new("it starts"), Tasks::new());
    let probes = config.paths.probes_of(&instance);
    let listener = socket::bind(&probes).await.with_context(|| {
        format!("answer probes of {instance}: each instance has an --instance-uid of its own")
    })?;
    tasks.spawn_until_stopped(
        "instance-probes",
        admin::serve_front(front.clone(), listener, tasks.clone()),
    );
    let root = SharedRoot {
        paths: config.paths.clone(),
        instance,
    };
    let mut instance = Instance {
        config,
        start,
        root,
        front,
        signals,
    };
    let serving = async {
        while instance.serve_once().await?.is_continue() {}
        Ok(())
    };
    let ended = serving.await;
    tasks.drain(limit::DRAIN).await;
    // The next instance that serves removes one that is left.
    let _ = std::fs::remove_file(probes);
    ended
}

impl Instance {
    async fn serve_once(&mut self) -> Result<ControlFlow<()>> {
        let (lease, mut previous) = tokio::select! {
            // Nothing is begun yet.
            () = self.signals.received() => return Ok(ControlFlow::Break(())),
            acquired = waiting::acquire(&self.root, &self.start.listeners, |state| self.front.stand_by(&state)) => acquired?,
        };
        self.front.stand_by("it starts");
        self.start.listeners.take_back();
        let daemon = Daemon::start(self.config.clone(), &self.start, previous.is_none()).await?;
        self.root.remove_abandoned_sockets().await;
        let mut requests = HandoverListener::open(&self.root).await?;
        self.front.serve(daemon.admin.clone());
        super::report_ready(&self.start);
        if let Some(previous) = &mut previous {
            tracing::info!(from = %previous.instance, "took over from the instance before");
            tokio::select! {
                () = self.signals.received() => return Ok(self.stop(daemon).await),
                // The connection is kept: by its end the other instance learns of the end of this one.
                () = ended(&mut previous.connection) => {}
            }
            daemon.kubelet_sockets.set_alone();
        }
        let successor = tokio::select! {
            // An instance that sends a request in this moment sees the connection end, and the lock free.
            () = self.signals.received() => return Ok(self.stop(daemon).await),
            successor = requests.newer_instance() => successor,
        };
        // Later requests find the successor, or no listener yet.
        drop((requests, previous));
        tracing::info!(to = %successor.instance, "handing over to a newer instance");
        self.front.stand_by(&format!(
            "it hands over to the newer instance {}",
            successor.instance
        ));
        let kubelet_sockets = daemon.hand_over().await;
        drop(lease);
        Ok(self.stand_by(kubelet_sockets, successor).await)
    }

    async fn stop(&mut self, daemon: Daemon) -> ControlFlow<()> {
        super::stop(daemon, &mut self.signals).await;
        ControlFlow::Break(())
    }

    /// Passes the sockets to the successor, forwards calls until it serves, and waits for its end.
    async fn stand_by(
        &mut self,
        kubelet_sockets: KubeletSockets,
        mut successor: Peer,
    ) -> ControlFlow<()> {
        let released = Message::Released {
            instance: self.root.instance.clone(),
        };
        let reported = async {
            let connection = &mut successor.connection;
            if let Err(error) = connection.give(&self.start.listeners, &released).await {
                tracing::warn!(
                    error = chain(&error),
                    "the newer instance does not take the sockets"
                );
                return false;
            }
            matches!(
                connection.receive(HANDOVER_SERVING).await,
                Ok(Some(Message::Serving))
            )
        };
        let serves = tokio::select! {
            // Connections end in either case.
            () = self.signals.received() => None,
            serves = reported => Some(serves),
        };
        if serves == Some(false) {
            // The calls that were forwarded wait in the sockets' backlog: they are answered when this instance serves again.
            tokio::spawn(async move { kubelet_sockets.drain().await });
        } else {
            kubelet_sockets.drain().await;
        }
        // A successor that is gone needs no message.
        let _ = successor.connection.send(&Message::Ended).await;
        let instance = &successor.instance;
        match serves {
            None => return ControlFlow::Break(()),
            Some(true) => {
                tracing::info!(serves = %instance, "the newer instance serves; standing by")
            }
            Some(false) => {
                tracing::warn!(%instance, "the newer instance did not say that it serves")
            }
        }
        self.front.stand_by(&format!(
            "it is on standby: the newer instance {instance} serves"
        ));
        let ended = async {
            successor.connection.closed().await;
            // It may be started again at once, and takes precedence.
            tokio::time::sleep(HANDOVER_PATIENCE).await;
        };
        tokio::select! {
            // Nothing is begun.
            () = self.signals.received() => ControlFlow::Break(()),
            () = ended => ControlFlow::Continue(()),
        }
    }
}

/// Says that this instance serves, and waits until the other has ended its connections, or itself.
async fn ended(previous: &mut Connection) {
    let ended = async {
        previous.send(&Message::Serving).await?;
        previous.receive(HANDOVER_ENDED).await
    };
    match ended.await {
        Ok(Some(Message::Ended) | None) => {}
        Ok(Some(message)) => {
            tracing::debug!(
                message = message.word(),
                "the instance before sent what makes no sense"
            )
        }
        Err(error) => {
            tracing::warn!(
                error = chain(&error),
                "the instance before did not say that it has ended"
            )
        }
    }
}

#[cfg(test)]
mod tests;
