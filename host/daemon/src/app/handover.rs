//! Instances of the daemon that take turns on one root, as pods of a DaemonSet do in a surge update (`docs/decisions/0009-surge-updates.md`).
//!
//! Of the instances that run one serves, and the others wait for their turn. A newer one is handed the place at its request; an older
//! one stands by, and serves again when the newer one is gone before it. Who has the place is known by a lock that the kernel gives back:
//! no crash leaves it taken, and no two serve.
//!
//! # Life of an instance
//!
//! `waits → serves → hands over → stands by`, and `serves` again if the newer instance ends first. A file has the order of the instances. A
//! handover ends everything but the kubelet's sockets: calls fail with a problem that says to retry, the bridge leaves its sockets open, the
//! checkpoint is closed, and the sockets are removed when the next instance has its own.

mod asker;
mod holder;
mod order;
mod place;
mod words;

use anyhow::{Context, Result};
use tokio::time::timeout;

use self::asker::Taken;
use self::holder::{Holder, Successor};
use self::place::Place;
use super::{Daemon, KubeletSockets, Signals};
use crate::admin::{self, Front};
use crate::config::Config;
use nodedock_base::socket;
use nodedock_base::tasks::Tasks;
use nodedock_model::{Uid, limit};

/// Whether another turn may come.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Turn,
    Stop,
}

struct Turns {
    config: Config,
    boot_id: String,
    place: Place,
    /// Answers probes about this instance, whoever serves.
    front: Front,
    signals: Signals,
}

/// Serves whenever it is this instance's turn, until a signal says stop.
pub(super) async fn run(config: Config, boot_id: String, instance: Uid, signals: Signals) -> Result<()> {
    super::prepare_folders(&config)?;
    let (front, tasks) = (Front::new("it starts"), Tasks::new());
    let probes = config.paths.probes_of(&instance);
    let listener = socket::bind(&probes).await.with_context(|| {
        format!("answer probes of {instance}: each instance has an --instance-uid of its own")
    })?;
    tasks.spawn("instance-probes", admin::serve_front(front.clone(), listener, tasks.clone()));
    let place = Place::new(&config.paths, instance);
    let mut turns = Turns { config, boot_id, place, front, signals };
    let ended = loop {
        match turns.turn().await {
            Ok(Next::Turn) => {}
            Ok(Next::Stop) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    tasks.drain(limit::DRAIN).await;
    // One that is left is removed by whoever serves next.
    let _ = std::fs::remove_file(probes);
    ended
}

impl Turns {
    async fn turn(&mut self) -> Result<Next> {
        let taken = tokio::select! {
            // Nothing is begun yet.
            () = self.signals.wanted() => return Ok(Next::Stop),
            taken = asker::take(&self.place, |words| self.front.stand_by(&words)) => taken?,
        };
        self.front.stand_by("it starts");
        let Taken { lease, mut before } = taken;
        let daemon = Daemon::start(self.config.clone(), self.boot_id.clone()).await?;
        self.place.sweep().await;
        let mut holder = Holder::open(&self.place).await?;
        self.front.serve(daemon.admin.clone());
        super::say_ready();
        if let Some(before) = &mut before {
            tracing::info!(from = %before.instance, "took over from the instance before");
            tokio::select! {
                // The drain is the same whether its sockets were known or not.
                () = self.signals.wanted() => return Ok(self.stop(daemon).await),
                known = timeout(limit::HANDOVER_REGISTERED, daemon.kubelet_sockets.known_to_kubelet()) => {
                    if known.is_err() {
                        tracing::warn!("the kubelet does not know all drivers yet; the instance before gives its sockets up");
                    }
                }
            }
            before.serving().await;
        }
        let successor = tokio::select! {
            // Whoever asks in this moment sees the connection end, and the place free.
            () = self.signals.wanted() => return Ok(self.stop(daemon).await),
            successor = holder.asked() => successor,
        };
        // Whoever asks from now on finds the successor, or nobody yet.
        drop((holder, before));
        let kubelet_sockets = self.hand_over(daemon, &successor).await;
        drop(lease);
        self.step_back(kubelet_sockets, successor).await
    }

    async fn stop(&mut self, daemon: Daemon) -> Next {
        super::stop(daemon, &mut self.signals).await;
        Next::Stop
    }

    /// Ends all but the sockets that the kubelet knows.
    async fn hand_over(&self, daemon: Daemon, successor: &Successor) -> KubeletSockets {
        tracing::info!(to = %successor.instance, "handing over to a newer instance");
        self.front.stand_by(&format!("it hands over to the newer instance {}", successor.instance));
        daemon.hand_over().await
    }

    /// Keeps the kubelet's sockets until the successor has its own, and stands by for its end.
    async fn step_back(&mut self, kubelet_sockets: KubeletSockets, mut successor: Successor) -> Result<Next> {
        let served = successor.release(&self.place.instance).await
            && tokio::select! {
                // The sockets go in either case.
                () = self.signals.wanted() => {
                    kubelet_sockets.drain().await;
                    return Ok(Next::Stop);
                }
                served = successor.serves(limit::HANDOVER_SOCKETS) => served,
            };
        kubelet_sockets.drain().await;
        if served {
            tracing::info!(serves = %successor.instance, "the newer instance serves; standing by");
        } else {
            tracing::warn!(instance = %successor.instance, "the newer instance did not say that it serves");
        }
        self.front.stand_by(&format!("it stands by: the newer instance {} serves", successor.instance));
        let over = async {
            successor.gone().await;
            // It may be started again at once, and has the place then.
            tokio::time::sleep(limit::HANDOVER_PATIENCE).await;
        };
        tokio::select! {
            // Nothing is begun.
            () = self.signals.wanted() => Ok(Next::Stop),
            () = over => Ok(Next::Turn),
        }
    }
}

#[cfg(test)]
mod tests;
