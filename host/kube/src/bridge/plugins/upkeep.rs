//! Looks for devices that no pod has any more, and gives them up.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::HeldDevices;
use super::absence::{Absences, Looked};
use super::allocate::Allocations;
use super::counters::Counters;
use super::in_use::InUse;
use nodedock_base::backoff::spread;
use nodedock_base::conditions::Conditions;
use nodedock_base::device_plugin_sockets::{KUBELET_SOCKET, SocketId, Sockets};
use nodedock_base::tasks::Tasks;
use nodedock_model::{Problem, limit};

/// The code of the condition that nobody tells which devices pods have.
pub(super) const UNKNOWN: &str = "pod-resources-away";

pub(super) struct Upkeep {
    pub(super) allocations: Arc<Allocations>,
    pub(super) counters: Arc<Counters>,
    pub(super) conditions: Conditions,
    /// The kubelet's socket of pod-resources, the subject of the condition.
    pub(super) subject: String,
    pub(super) seen: watch::Receiver<Arc<Sockets>>,
    pub(super) tasks: Tasks,
}

impl Upkeep {
    /// Until the tasks stop. Looks only while there are devices that a kubelet's device manager gave.
    pub(super) async fn run(self) {
        let stopped = self.tasks.stopped();
        tokio::pin!(stopped);
        let (mut absences, mut kubelet, mut failing) = (Absences::default(), None, None);
        loop {
            let held = self.allocations.held();
            self.allocations.retain(&held, Instant::now());
            if held.is_empty() {
                (absences, failing) = (Absences::default(), None);
                self.conditions.clear(UNKNOWN, &self.subject);
            } else {
                tokio::select! {
                    // What is not given up now is found after the next start.
                    () = &mut stopped => return,
                    () = self.turn(&held, &mut absences, &mut kubelet, &mut failing) => {}
                }
            }
            let pause = spread(limit::IN_USE_PERIOD, chance());
            tokio::select! {
                () = &mut stopped => return,
                // The claim that is asked for is not there yet: looked at after the pause.
                () = self.allocations.begun.notified(), if held.is_empty() => {
                    tokio::select! {
                        () = &mut stopped => return,
                        () = tokio::time::sleep(pause) => {}
                    }
                }
                () = tokio::time::sleep(pause), if !held.is_empty() => {}
            }
        }
    }

    async fn turn(
        &self,
        held: &[HeldDevices],
        absences: &mut Absences,
        kubelet: &mut Option<SocketId>,
        failing: &mut Option<Instant>,
    ) {
        let before = self.kubelet();
        let listed = self.allocations.list(limit::IN_USE_DEADLINE).await;
        if before != *kubelet || before != self.kubelet() {
            *kubelet = self.kubelet();
            absences.forget();
        }
        match listed {
            Ok(in_use) => {
                *failing = None;
                self.conditions.clear(UNKNOWN, &self.subject);
                self.give_up(held, &in_use, absences).await;
            }
            Err(error) => self.complain(*failing.get_or_insert_with(Instant::now), &error),
        }
    }

    fn kubelet(&self) -> Option<SocketId> {
        self.seen.borrow().get(KUBELET_SOCKET).copied()
    }

    async fn give_up(&self, held: &[HeldDevices], in_use: &InUse, absences: &mut Absences) {
        let looked: Vec<_> = held
            .iter()
            .map(|held| Looked {
                claim: held.claim.clone(),
                asked: self.allocations.asked_at(&held.claim.uid),
            })
            .collect();
        let of = |looked: &Looked| held.iter().find(|held| held.claim == looked.claim);
        let is_used = |looked: &Looked| of(looked).is_some_and(|held| in_use.resource(held).is_some());
        for over in absences.look(&looked, is_used, Instant::now()) {
            let Some(held) = of(&over) else { continue };
            match self.allocations.give_up(held, over.asked).await {
                Ok(false) => {}
                Ok(true) => {
                    self.counters.gave_up();
                    tracing::info!(driver = %held.driver, claim = %held.claim, devices = ?held.devices, "devices that no pod has given up");
                }
                // The claim manager goes on by itself, and the next look asks again.
                Err(problem) => {
                    tracing::debug!(driver = %held.driver, claim = %held.claim, %problem, "devices not given up yet");
                }
            }
        }
    }

    fn complain(&self, since: Instant, error: &str) {
        tracing::debug!(error, "which devices pods have is not known");
        if since.elapsed() >= limit::IN_USE_UNKNOWN {
            let message = format!(
                "the kubelet does not tell which devices pods have ({error}): devices of extended resources stay with pods that are gone"
            );
            self.conditions.set(&self.subject, Problem::unavailable(UNKNOWN, message));
        }
    }
}

/// Any number.
fn chance() -> u64 {
    u64::from(Duration::from_millis(nodedock_base::clock::now_ms()).subsec_millis()) * 7919
}
