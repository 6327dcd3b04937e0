//! The inventory poller of a serving WASM driver: discovers its devices on kernel events, on its timer and on request, and publishes changes.
//! When a driver's quarantine may be probed, the poller probes it, unless another call does; when the quarantine ends, it catches up on a
//! missed discovery.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::kernel::{KernelEvent, KernelEvents};
use crate::{QUARANTINED, Quarantined, Trigger, WasmDriver};
use nodedock_base::clock::now_ms;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{Call, Published};
use nodedock_core::registry::{DriverView, Registry};
use nodedock_model::{DriverKind, HealthReport, Problem, limit};

/// Requests that wait for a discovery; one discovery answers them all.
const LOOKS_WAITING_MAX: usize = 16;
/// Paths of changed devices in one trigger; with more the driver has to look at everything.
const EVENT_PATHS_MAX: usize = 256;

/// Requests a discovery now.
#[derive(Clone)]
pub(super) struct Looker(mpsc::Sender<oneshot::Sender<()>>);

impl Looker {
    /// Returns when the devices were discovered.
    pub(super) async fn look(&self) {
        let (done, looked) = oneshot::channel();
        if self.0.send(done).await.is_ok() {
            // An error means that the driver was removed meanwhile.
            looked.await.ok();
        }
    }
}

pub(super) struct InventoryPoller {
    pub(super) registry: Registry,
    pub(super) source: String,
    pub(super) driver: Arc<WasmDriver>,
    pub(super) published: watch::Sender<Arc<Published>>,
}

impl InventoryPoller {
    /// Starts the poller; it ends with `tasks`.
    pub(super) fn start(self, tasks: &Tasks, events: &KernelEvents) -> Looker {
        let (sender, looks) = mpsc::channel(LOOKS_WAITING_MAX);
        let (kernel, stop) = (events.listen(), tasks.clone());
        tasks.spawn("inventory-poller", async move { self.run(stop, kernel, looks).await });
        Looker(sender)
    }

    async fn run(
        self,
        tasks: Tasks,
        kernel: broadcast::Receiver<KernelEvent>,
        looks: mpsc::Receiver<oneshot::Sender<()>>,
    ) {
        let stopped = tasks.stopped();
        tokio::pin!(stopped);
        let mut inbox = Inbox::new(&self.driver, kernel, looks);
        loop {
            let next = tokio::select! {
                // A discovery that did not begin is dropped with the driver.
                () = &mut stopped => return,
                next = self.next(&mut inbox) => next,
            };
            match next {
                Next::End => return,
                Next::Nothing => {}
                Next::Look(trigger, waiting) => {
                    // A quarantine may have begun since the check.
                    inbox.probes.missed |= self.look(&tasks, trigger).await == Look::HeldBack;
                    // The caller may no longer wait.
                    for done in waiting {
                        let _ = done.send(());
                    }
                }
            }
        }
    }

    /// Waits for something to do.
    async fn next(&self, inbox: &mut Inbox) -> Next {
        let held = inbox.quarantine.borrow_and_update().clone();
        if held.is_none() && std::mem::take(&mut inbox.probes.missed) {
            return Next::Look(Trigger::Timer, inbox.waiting());
        }
        let trigger = tokio::select! {
            // A request that is not received stays in the channel.
            look = inbox.looks.recv() => return match look {
                Some(done) => Next::Look(Trigger::Request, inbox.waiting().into_iter().chain([done]).collect()),
                None => Next::End,
            },
            // An event that is not received stays in the channel.
            event = inbox.kernel.recv() => match self.gather(event, &mut inbox.kernel).await {
                Some(trigger) => trigger,
                None => return Next::Nothing,
            },
            // A change that is not seen here is seen in the next iteration.
            changed = inbox.quarantine.changed() => {
                return if changed.is_ok() { Next::Nothing } else { Next::End };
            }
            // Time that has passed here has passed in the next iteration as well.
            () = inbox.probes.due(held.as_ref()) => {
                inbox.probes.next = Some(tokio::time::Instant::now() + limit::QUARANTINE_PROBE_WAIT);
                return Next::Look(Trigger::Timer, inbox.waiting());
            }
            _ = inbox.timer.tick() => Trigger::Timer,
        };
        if self.driver.containment().quarantined().is_some() {
            inbox.probes.missed = true;
            return Next::Nothing;
        }
        Next::Look(trigger, inbox.waiting())
    }

    /// Merges the events of a burst. None: none of them is for this driver.
    async fn gather(
        &self,
        first: Result<KernelEvent, broadcast::error::RecvError>,
        kernel: &mut broadcast::Receiver<KernelEvent>,
    ) -> Option<Trigger> {
        let mut paths = BTreeSet::new();
        let mut everything = false;
        let mut event = first;
        let mut quiet = None;
        loop {
            match event {
                Ok(KernelEvent::Device { subsystem, path }) => {
                    if self.driver.info().event_subsystems.contains(&subsystem) {
                        paths.insert(path);
                    }
                }
                Ok(KernelEvent::Node) => {
                    everything |= !self.driver.info().capabilities.device_nodes.is_empty()
                }
                Ok(KernelEvent::Lost) | Err(broadcast::error::RecvError::Lagged(_)) => everything = true,
                Err(broadcast::error::RecvError::Closed) => return None,
            }
            if paths.is_empty() && !everything {
                return None;
            }
            let end = *quiet.get_or_insert_with(|| tokio::time::Instant::now() + limit::EVENT_DEBOUNCE);
            match tokio::time::timeout_at(end, kernel.recv()).await {
                Ok(next) => event = next,
                Err(_) => break,
            }
        }
        let count = if everything { EVENT_PATHS_MAX + 1 } else { paths.len() };
        Some(Trigger::Events(if count > EVENT_PATHS_MAX { Vec::new() } else { paths.into_iter().collect() }))
    }

    async fn look(&self, tasks: &Tasks, trigger: Trigger) -> Look {
        let started = Instant::now();
        let call =
            Call { request_id: nodedock_base::request::new_id(), deadline: self.driver.look_deadline() };
        let outcome = look(&self.driver, &call, trigger).await;
        let duration_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        match outcome {
            // Another version serves by now, or none.
            _ if tasks.is_stopping() => {}
            Ok(found) => self.publish(tasks, found, duration_us),
            // The call was refused, and the quarantine is shown.
            Err(problem) if problem.code == QUARANTINED => return Look::HeldBack,
            Err(problem) => self.report_failure(tasks, &call, problem, duration_us),
        }
        Look::Done
    }

    /// Changes what is shown, unless another version is shown already.
    fn show(&self, tasks: &Tasks, change: impl FnOnce(&mut DriverView)) {
        let change = |view: &mut DriverView| match tasks.is_stopping() {
            true => {}
            false => change(view),
        };
        self.registry.update(DriverKind::Wasm, &self.source, change);
    }

    fn publish(&self, tasks: &Tasks, found: Published, duration_us: u64) {
        let devices = found.inventory.device_count();
        let changed = self.published.send_if_modified(|known| {
            let changed = **known != found;
            if changed {
                *known = Arc::new(found);
            }
            changed
        });
        self.show(tasks, |view| {
            view.discovered_ms = Some(now_ms());
            view.problem = None;
            if changed {
                view.devices = devices;
                view.note("devices changed", "discovery", duration_us, None);
            }
        });
        if changed {
            self.registry.tell_devices(&self.driver.info().name);
            tracing::info!(driver = %self.driver.info().name, devices, "devices changed");
        }
    }

    /// Published devices stay: they do not disappear because a discovery failed.
    fn report_failure(&self, tasks: &Tasks, call: &Call, problem: Problem, duration_us: u64) {
        let mut first = false;
        self.show(tasks, |view| {
            first = view.problem.as_ref().is_none_or(|known| known.code != problem.code);
            if first {
                view.note("discovery failed", "discovery", duration_us, Some(problem.clone()));
            }
            view.problem = Some(problem.clone());
        });
        if first {
            let (driver, request) = (&self.driver.info().name, &call.request_id);
            tracing::warn!(%driver, %request, code = problem.code, %problem, "discovery failed, the devices stay as they were");
        }
    }
}

/// What the poller waits for.
struct Inbox {
    kernel: broadcast::Receiver<KernelEvent>,
    looks: mpsc::Receiver<oneshot::Sender<()>>,
    timer: tokio::time::Interval,
    quarantine: watch::Receiver<Option<Quarantined>>,
    probes: Probes,
}

impl Inbox {
    fn new(
        driver: &WasmDriver,
        kernel: broadcast::Receiver<KernelEvent>,
        looks: mpsc::Receiver<oneshot::Sender<()>>,
    ) -> Self {
        let mut timer = tokio::time::interval(driver.info().discovery_period);
        timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        timer.reset();
        Self { kernel, looks, timer, quarantine: driver.containment().follow(), probes: Probes::default() }
    }

    /// All waiting requests: one discovery answers them all.
    fn waiting(&mut self) -> Vec<oneshot::Sender<()>> {
        std::iter::from_fn(|| self.looks.try_recv().ok()).collect()
    }
}

/// What the poller does next.
enum Next {
    /// Discovers, and answers the requests.
    Look(Trigger, Vec<oneshot::Sender<()>>),
    Nothing,
    End,
}

/// The result of a discovery.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    Done,
    /// Refused by a quarantine: it is repeated when that is over.
    HeldBack,
}

/// The poller's part in a quarantine.
#[derive(Default)]
struct Probes {
    /// A discovery was refused.
    missed: bool,
    /// Not before it the poller probes again: its last probe may have been refused.
    next: Option<tokio::time::Instant>,
}

impl Probes {
    /// Returns when the driver may be probed; never while a call probes it, or without a quarantine.
    async fn due(&self, held: Option<&Quarantined>) {
        match held {
            Some(held) if !held.is_probed => {
                tokio::time::sleep_until(self.next.map_or(held.until, |next| next.max(held.until))).await;
            }
            _ => std::future::pending().await,
        }
    }
}

/// Discovers the inventory, then the devices' health where the driver reports it.
pub(super) async fn look(driver: &WasmDriver, call: &Call, trigger: Trigger) -> Result<Published, Problem> {
    let inventory = driver.discover(call, trigger).await?;
    let health = match driver.check_health(call).await {
        None => HealthReport::new(),
        Some(report) => report?,
    };
    Ok(Published { inventory, health })
}
