//! The inventory poller of a serving WASM driver: discovers its devices on kernel events, on its timer and on request, and publishes changes.
//! When a driver's quarantine may be probed, the poller probes it, unless another call does; when the quarantine ends, it catches up on a
//! missed discovery.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::kernel::{KernelEvent, KernelEvents};
use crate::{Quarantined, Trigger, WasmDriver};
use nodedock_base::clock::now_ms;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{Call, Published};
use nodedock_core::registry::{DriverView, Registry};
use nodedock_model::{DriverKind, Problem, ProblemCode, limit};

/// Requests that wait for a discovery; one discovery answers them all.
const REQUESTS_WAITING_MAX: usize = 16;
/// Paths of changed devices in one trigger; with more the driver has to look at everything.
const EVENT_PATHS_MAX: usize = 256;

/// Requests a discovery now.
#[derive(Clone)]
pub(super) struct DiscoveryRequests(mpsc::Sender<oneshot::Sender<()>>);

impl DiscoveryRequests {
    /// Returns when the devices were discovered.
    pub(super) async fn discover(&self) {
        let (done, discovered) = oneshot::channel();
        if self.0.send(done).await.is_ok() {
            // no error: the driver was removed meanwhile
            discovered.await.ok();
        }
    }
}

struct InventoryPoller {
    registry: Registry,
    source: String,
    driver: Arc<WasmDriver>,
    published: watch::Sender<Arc<Published>>,
    tasks: Tasks,
    kernel: broadcast::Receiver<KernelEvent>,
    requests: mpsc::Receiver<oneshot::Sender<()>>,
    /// Requests that the current discovery answers.
    waiting: Vec<oneshot::Sender<()>>,
    timer: tokio::time::Interval,
    quarantine: watch::Receiver<Option<Quarantined>>,
    /// A quarantine refused a discovery.
    missed: bool,
    /// The earliest time of the next probe: the last one may have been refused.
    next_probe: Option<tokio::time::Instant>,
}

/// Starts the poller of a driver from a source file; it ends with `tasks`.
pub(super) fn start(
    registry: &Registry,
    source: &str,
    driver: Arc<WasmDriver>,
    published: watch::Sender<Arc<Published>>,
    tasks: &Tasks,
    events: &KernelEvents,
) -> DiscoveryRequests {
    let (sender, requests) = mpsc::channel(REQUESTS_WAITING_MAX);
    let mut timer = tokio::time::interval(driver.info().discovery_period);
    timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    timer.reset();
    let poller = InventoryPoller {
        registry: registry.clone(),
        source: source.to_owned(),
        quarantine: driver.containment().follow(),
        driver,
        published,
        tasks: tasks.clone(),
        kernel: events.listen(),
        requests,
        waiting: Vec::new(),
        timer,
        missed: false,
        next_probe: None,
    };
    tasks.spawn("inventory-poller", poller.run());
    DiscoveryRequests(sender)
}

impl InventoryPoller {
    async fn run(mut self) {
        let stopped = self.tasks.stopped();
        tokio::pin!(stopped);
        loop {
            let next = tokio::select! {
                // A discovery that did not begin is dropped with the driver.
                () = &mut stopped => return,
                next = self.next() => next,
            };
            let Some(trigger) = next else { return };
            self.waiting
                .extend(std::iter::from_fn(|| self.requests.try_recv().ok()));
            self.poll(trigger).await;
            for done in self.waiting.drain(..) {
                // The caller may no longer wait.
                let _ = done.send(());
            }
        }
    }

    /// Waits for a reason to discover. None: no one can request a discovery any more, because the driver no longer serves.
    async fn next(&mut self) -> Option<Trigger> {
        loop {
            let quarantine = self.quarantine.borrow_and_update().clone();
            if quarantine.is_none() && std::mem::take(&mut self.missed) {
                return Some(Trigger::Timer);
            }
            let trigger = tokio::select! {
                // A request that is not received stays in the channel.
                request = self.requests.recv() => {
                    self.waiting.push(request?);
                    return Some(Trigger::Request);
                }
                // An event that is not received stays in the channel.
                event = self.kernel.recv() => match self.gather(event).await {
                    Some(trigger) => trigger,
                    None => continue,
                },
                // A change that is not seen here is seen in the next iteration.
                changed = self.quarantine.changed() => {
                    changed.ok()?;
                    continue;
                }
                // Time that has passed here has passed in the next iteration as well.
                () = probe_due(quarantine.as_ref(), self.next_probe) => {
                    self.next_probe = Some(tokio::time::Instant::now() + limit::QUARANTINE_PROBE_WAIT);
                    return Some(Trigger::Timer);
                }
                _ = self.timer.tick() => Trigger::Timer,
            };
            if self.driver.containment().quarantined().is_none() {
                return Some(trigger);
            }
            self.missed = true;
        }
    }

    /// Merges the events of a burst. None: none of them is for this driver.
    async fn gather(
        &mut self,
        first: Result<KernelEvent, broadcast::error::RecvError>,
    ) -> Option<Trigger> {
        let info = self.driver.info();
        let (mut paths, mut everything, mut event, mut end) = (BTreeSet::new(), false, first, None);
        loop {
            match event {
                Ok(KernelEvent::Device { subsystem, path })
                    if info.event_subsystems.contains(&subsystem) =>
                {
                    paths.insert(path);
                }
                Ok(KernelEvent::Device { .. }) => {}
                Ok(KernelEvent::Node) => everything |= !info.capabilities.device_nodes.is_empty(),
                Ok(KernelEvent::Lost) | Err(broadcast::error::RecvError::Lagged(_)) => {
                    everything = true
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            }
            if paths.is_empty() && !everything {
                return None;
            }
            let end =
                *end.get_or_insert_with(|| tokio::time::Instant::now() + limit::EVENT_DEBOUNCE);
            match tokio::time::timeout_at(end, self.kernel.recv()).await {
                Ok(next) => event = next,
                Err(_) => break,
            }
        }
        if everything || paths.len() > EVENT_PATHS_MAX {
            paths.clear();
        }
        Some(Trigger::Events(paths.into_iter().collect()))
    }

    async fn poll(&mut self, trigger: Trigger) {
        let started = Instant::now();
        let call = self.driver.look_call();
        let outcome = self.driver.publish(&call, trigger).await;
        let duration_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        match outcome {
            // Another version serves by now, or none.
            _ if self.tasks.is_stopping() => {}
            Ok(found) => match self.not_granted(&found) {
                None => self.publish(found, duration_us),
                Some(problem) => self.report_failure(&call, problem, duration_us),
            },
            // A quarantine that began since the check refused the call: the discovery is repeated when it is over.
            Err(problem) if problem.code == ProblemCode::DriverQuarantined => self.missed = true,
            Err(problem) => self.report_failure(&call, problem, duration_us),
        }
    }

    /// The problem of pools with extended-resource names that the grant does not have.
    fn not_granted(&self, found: &Published) -> Option<Problem> {
        let missing = self.driver.missing_resources(&found.inventory);
        let message = format!(
            "pools have extended-resource names beyond the grant: {}",
            missing.join("; ")
        );
        (!missing.is_empty()).then(|| Problem::denied(ProblemCode::NotGranted, message))
    }

    /// Changes what is shown, unless another version is shown already.
    fn show(&self, change: impl FnOnce(&mut DriverView)) {
        let change = |view: &mut DriverView| match self.tasks.is_stopping() {
            true => {}
            false => change(view),
        };
        self.registry
            .sources
            .update(DriverKind::Wasm, &self.source, change);
    }

    fn publish(&self, found: Published, duration_us: u64) {
        let devices = found.inventory.device_count();
        let left_out = found.left_out.clone();
        let problem = found.telemetry.problem.clone();
        let changed = self.published.send_if_modified(|known| {
            let changed = known.differs(&found);
            *known = Arc::new(found);
            changed
        });
        let mut is_new_problem = false;
        self.show(|view| {
            view.discovered_ms = Some(now_ms());
            is_new_problem = problem
                .as_ref()
                .is_some_and(|problem| !is_known(view, problem));
            view.problem.clone_from(&problem);
            view.left_out = left_out;
            if is_new_problem {
                view.note(
                    "telemetry failed",
                    "discovery",
                    duration_us,
                    problem.clone(),
                );
            }
            if changed {
                view.devices = devices;
                view.note("devices changed", "discovery", duration_us, None);
            }
        });
        if let Some(problem) = problem.filter(|_| is_new_problem) {
            let driver = &self.driver.info().name;
            tracing::warn!(%driver, code = problem.code, %problem, "telemetry failed, the devices have no readings");
        }
        if changed {
            self.registry
                .sources
                .report_devices(&self.driver.info().name);
            tracing::info!(driver = %self.driver.info().name, devices, "devices changed");
        }
    }

    /// Published devices stay: they do not disappear because a discovery failed.
    fn report_failure(&self, call: &Call, problem: Problem, duration_us: u64) {
        let mut first = false;
        self.show(|view| {
            first = !is_known(view, &problem);
            if first {
                view.note(
                    "discovery failed",
                    "discovery",
                    duration_us,
                    Some(problem.clone()),
                );
            }
            view.problem = Some(problem.clone());
        });
        if first {
            let (driver, request) = (&self.driver.info().name, &call.request_id);
            tracing::warn!(%driver, %request, code = problem.code, %problem, "discovery failed, the devices stay as they were");
        }
    }
}

/// Returns whether a problem is shown already.
fn is_known(view: &DriverView, problem: &Problem) -> bool {
    view.problem
        .as_ref()
        .is_some_and(|known| known.code == problem.code)
}

/// Returns when the driver may be probed; never while a call probes it, or without a quarantine.
async fn probe_due(quarantine: Option<&Quarantined>, not_before: Option<tokio::time::Instant>) {
    match quarantine {
        Some(quarantine) if !quarantine.period.is_probed() => {
            let until = quarantine.period.until;
            tokio::time::sleep_until(not_before.map_or(until, |time| time.max(until))).await;
        }
        _ => std::future::pending().await,
    }
}
