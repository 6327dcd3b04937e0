//! The task that keeps the slices of this node's drivers as they are to be.
//!
//! It looks at the drivers when something changed there, and at a pool when its slices or what they are to be changed. Pools are
//! written one after the other, each at its own pace: one that is refused keeps no other waiting.

mod conditions;
mod look;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use self::conditions::refusal;
use super::content::Content;
use super::drivers::{Drivers, Look};
use super::health::Sick;
use super::pace::Pace;
use super::planner::{Counters, Owner, PlanError, PoolKey, Step, Stood, Times, Wish, plan, stood};
use super::report::{Outcome, PoolStatus, Report, Verb};
use super::view::{SliceEvent, View};
use super::{SliceApi, SliceError, SliceEvents, SliceParts, SliceSettings};
use crate::facts::NodeFacts;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_core::driver::Published;
use nodedock_model::{DeviceName, DriverName, PoolName, Problem, limit};

pub(super) struct Writer {
    api: Arc<dyn SliceApi>,
    node: watch::Receiver<Option<NodeFacts>>,
    doubt_node: Box<dyn Fn() + Send + Sync>,
    settings: SliceSettings,
    conditions: Conditions,
    report: Report,
    view: View,
    last: Look,
    /// What pools are to be, also of drivers that do not serve just now.
    wanted: BTreeMap<PoolKey, Wanted>,
    pools: BTreeMap<PoolKey, PoolState>,
    drivers: BTreeMap<DriverName, DriverState>,
    /// Since when drivers are gone whose slices are still there.
    gone: BTreeMap<DriverName, Instant>,
    /// Drivers whose slices are to go.
    withdrawn: BTreeSet<DriverName>,
    /// Where the server wanted counter sets when it was listed last.
    counters: Counters,
    /// When the drivers are to be looked at.
    look_at: Option<Instant>,
    /// Nobody tells of slices any more.
    stopped: bool,
}

/// What a pool is to be.
struct Wanted {
    content: Content,
    /// Which of all contents that it was to be.
    edition: u64,
}

struct PoolState {
    pace: Pace,
    times: Times,
    stood: Stood,
    generation: i64,
    /// The edition and the Node object that were carried out to the end last.
    done: Option<(u64, Owner)>,
}

impl PoolState {
    fn new(now: Instant) -> Self {
        let (times, stood) = (Times::default(), Stood::new());
        Self { pace: Pace::new(now), times, stood, generation: 0, done: None }
    }
}

/// Devices, by their driver's names.
type Tainted = BTreeSet<(PoolName, DeviceName)>;

/// What is remembered of a driver that serves.
#[derive(Default)]
struct DriverState {
    sick: Sick,
    /// What was looked at last, and the devices that were to be tainted then.
    seen: Option<(Arc<Published>, Tainted)>,
    /// Pools whose names are too long for the API, as they are told of.
    unnameable: BTreeSet<String>,
}

/// What becomes of a pool's slices.
enum Aim {
    /// They are to be that; empty: there are to be none.
    Write(Content, u64),
    Leave,
}

/// How a write ended that did not succeed.
enum Halt {
    Overtaken,
    Failed(SliceError),
}

impl Writer {
    pub(super) async fn run(parts: SliceParts) {
        let SliceParts { api, events, mut drivers, node, doubt_node, settings, conditions, report, tasks } =
            parts;
        let SliceEvents { mut events, following } = events;
        let mut writer = Self {
            api,
            node,
            doubt_node,
            settings,
            conditions,
            report,
            view: View::default(),
            last: Look::default(),
            wanted: BTreeMap::new(),
            pools: BTreeMap::new(),
            drivers: BTreeMap::new(),
            gone: BTreeMap::new(),
            withdrawn: BTreeSet::new(),
            counters: Counters::default(),
            look_at: Some(Instant::now()),
            stopped: false,
        };
        let stopped = tasks.stopped();
        tokio::pin!(stopped);
        while !writer.stopped {
            tokio::select! {
                biased;
                // What is not written, or written and not known yet, is found at the next start.
                () = &mut stopped => return,
                () = writer.turn(&mut events, drivers.as_mut()) => {}
            }
        }
        drop(following);
    }

    /// Waits for something to do, and does it.
    async fn turn(&mut self, events: &mut mpsc::Receiver<SliceEvent>, drivers: &mut dyn Drivers) {
        let due = self.due();
        tokio::select! {
            // What is not received stays in its channel, for each of the three; time that has passed has passed.
            event = events.recv() => match event {
                Some(event) => self.take(event),
                None => self.stopped = true,
            },
            () = drivers.changed() => self.look_soon(),
            Ok(()) = self.node.changed() => self.touch_all(),
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
        }
        for (name, uid) in self.view.take_doubtful() {
            self.read(&name, &uid).await;
        }
        let now = Instant::now();
        if self.look_at.is_some_and(|at| at <= now) && self.view.is_listed() {
            self.look_at = None;
            self.look(drivers.look(), now);
        }
        if let Some(key) = self.next_pool(now) {
            self.write(&key).await;
        }
    }

    fn due(&self) -> Option<Instant> {
        let look = self.look_at.filter(|_| self.view.is_listed());
        let pools = self.pools.values().flat_map(|pool| [pool.pace.due(), pool.pace.calm_at()]);
        let writable = self.is_writable();
        let pools = pools.flatten().filter(|_| writable);
        look.into_iter().chain(pools).min()
    }

    fn owner(&self) -> Option<Owner> {
        self.node.borrow().as_ref().map(|node| Owner { name: node.name.to_string(), uid: node.uid.clone() })
    }

    fn is_writable(&self) -> bool {
        self.view.is_listed() && self.node.borrow().is_some()
    }

    /// The pool that waits longest of those that are due.
    fn next_pool(&mut self, now: Instant) -> Option<PoolKey> {
        if !self.is_writable() {
            return None;
        }
        for (key, pool) in &mut self.pools {
            if pool.pace.calm_at().is_some_and(|at| at <= now) && pool.pace.calm(now) {
                self.conditions.clear(super::CONTESTED, &key.to_string());
            }
        }
        let due = self.pools.iter().filter_map(|(key, pool)| Some((pool.pace.due()?, key)));
        due.filter(|(at, _)| *at <= now).min().map(|(_, key)| key.clone())
    }

    fn take(&mut self, event: SliceEvent) {
        let first = !self.view.is_listed();
        let touched = self.view.apply(event);
        let told: BTreeSet<_> = touched.iter().map(|key| key.driver.clone()).collect();
        touched.iter().for_each(|key| self.touch(key));
        // A server that was replaced by a newer one takes what the old one did not, and wants it otherwise.
        let counters = self.api.counters();
        if std::mem::replace(&mut self.counters, counters) != counters {
            self.touch_all();
        }
        if first && self.view.is_listed() {
            self.look_at = Some(Instant::now());
        } else if told.iter().any(|driver| !self.last.present.contains(driver)) {
            // Slices of a driver that is not here may have to go.
            self.look_soon();
        }
    }

    fn look_soon(&mut self) {
        self.look_at_latest(Instant::now() + limit::SLICE_SETTLE);
    }

    fn look_at_latest(&mut self, at: Instant) {
        self.look_at = Some(self.look_at.map_or(at, |known| known.min(at)));
    }

    fn touch(&mut self, key: &PoolKey) {
        let now = Instant::now();
        self.pool(key, now).pace.touched(now);
    }

    fn touch_all(&mut self) {
        let held = self.view.all().map(|held| held.key.clone());
        let keys: BTreeSet<_> = self.wanted.keys().cloned().chain(held).collect();
        keys.iter().for_each(|key| self.touch(key));
    }

    fn pool(&mut self, key: &PoolKey, now: Instant) -> &mut PoolState {
        self.pools.entry(key.clone()).or_insert_with(|| PoolState::new(now))
    }

    fn aim(&self, key: &PoolKey) -> Aim {
        if let Some(wanted) = self.wanted.get(key) {
            return Aim::Write(wanted.content.clone(), wanted.edition);
        }
        match self.last.serving.contains_key(&key.driver) || self.withdrawn.contains(&key.driver) {
            true => Aim::Write(Content::default(), 0),
            false => Aim::Leave,
        }
    }

    /// Looks at one pool, and writes what differs.
    async fn write(&mut self, key: &PoolKey) {
        let now = Instant::now();
        // A taint that another instance of ours wrote is taken up before it could be taken away.
        if let Some(published) = self.last.serving.get(&key.driver).cloned() {
            self.look_at_driver(&key.driver, &published, now);
        }
        self.pool(key, now).pace.begun();
        let (Some(owner), Aim::Write(content, edition)) = (self.owner(), self.aim(key)) else {
            self.pools.remove(key);
            return;
        };
        let view = &self.view;
        let pool = self.pools.entry(key.clone()).or_insert_with(|| PoolState::new(now));
        pool.times.learn(view.of_pool(key), &content);
        let newest = view.of_pool(key).map(|held| held.generation).max();
        pool.generation = newest.unwrap_or(pool.generation).max(0);
        let (counters, generation) = (self.api.counters(), pool.generation);
        let wish = Wish {
            key,
            owner: &owner,
            content: &content,
            counters,
            generation,
            stood: &pool.stood,
            times: &pool.times,
        };
        let planned = match plan(&wish, view.of_pool(key)) {
            Ok(planned) => planned,
            Err(error) => return self.cannot_be_told(key, &error),
        };
        let changes = !planned.steps.is_empty();
        for step in planned.steps {
            if let Err(halt) = self.carry_out(step).await {
                return self.halt(key, halt);
            }
        }
        let status = PoolStatus {
            is_current: true,
            slices: planned.slices,
            devices: planned.devices,
            generation: planned.generation,
            written_ms: changes.then(now_ms),
            problem: None,
        };
        self.is_written(key, status, (edition, owner), &content);
    }

    /// The pool is as it is to be.
    fn is_written(&mut self, key: &PoolKey, status: PoolStatus, done: (u64, Owner), content: &Content) {
        let now = Instant::now();
        let pool = self.pools.entry(key.clone()).or_insert_with(|| PoolState::new(now));
        pool.generation = status.generation;
        // Before somebody deletes them.
        pool.times.learn(self.view.of_pool(key), content);
        pool.stood = stood(self.view.of_pool(key));
        let is_repair = status.written_ms.is_some() && pool.done.as_ref() == Some(&done);
        match status.written_ms {
            Some(_) => pool.pace.written(now),
            None => pool.pace.found_right(),
        }
        pool.done = Some(done);
        let contested = is_repair && pool.pace.repaired(now);
        if is_repair {
            self.report.repaired();
            (self.doubt_node)();
            tracing::info!(pool = %key, "slices written again, others had changed them");
        } else if status.written_ms.is_some() {
            let (slices, devices, generation) = (status.slices, status.devices, status.generation);
            tracing::info!(pool = %key, slices, devices, generation, "slices written");
        }
        if contested {
            self.tell_contested(key);
        }
        self.conditions.clear(super::REFUSED, &key.to_string());
        self.tell_dropped(&key.driver);
        let before = self.report.pool(key).and_then(|status| status.written_ms);
        let written_ms = status.written_ms.or(before);
        let is_there = !content.is_empty();
        self.report.tell(key, is_there.then_some(PoolStatus { written_ms, ..status }));
        if !is_there
            && self
                .pools
                .get(key)
                .is_some_and(|pool| pool.pace.due().is_none() && pool.pace.calm_at().is_none())
        {
            self.pools.remove(key);
        }
    }

    async fn carry_out(&mut self, step: Step) -> Result<(), Halt> {
        match step {
            Step::Delete(was) => {
                let deleted = self.api.delete(&was.name, &was.uid, &was.resource_version).await;
                match self.count(Verb::Delete, deleted) {
                    // It stays until its finalizers are gone, and counts until then.
                    Ok(()) if was.has_finalizers() => self.read(&was.name, &was.uid).await,
                    Ok(()) | Err(SliceError::NotFound(_)) => drop(self.view.deleted(&was.name, &was.uid)),
                    Err(error) => return Err(self.look_again(&was.name, &was.uid, error).await),
                }
            }
            Step::Update { was, draft } => {
                let updated = self.api.update(&was, &draft).await;
                match self.count(Verb::Update, updated) {
                    Ok(held) => self.view.wrote(draft.content, held),
                    Err(error) => return Err(self.look_again(&was.name, &was.uid, error).await),
                }
            }
            Step::Create { generate_name, draft } => {
                let created = self.api.create(&generate_name, &draft).await;
                match self.count(Verb::Create, created) {
                    Ok(held) => self.view.wrote(draft.content, held),
                    // The server makes another name the next time.
                    Err(SliceError::Conflict(_)) => return Err(Halt::Overtaken),
                    Err(error) => return Err(Halt::Failed(error)),
                }
            }
        }
        Ok(())
    }

    fn count<T>(&self, verb: Verb, outcome: Result<T, SliceError>) -> Result<T, SliceError> {
        let word = match &outcome {
            Ok(_) => Outcome::Done,
            Err(SliceError::Conflict(_) | SliceError::NotFound(_)) => Outcome::Conflict,
            Err(SliceError::Refused(_)) => Outcome::Refused,
            Err(SliceError::Away { .. }) => Outcome::Failed,
        };
        self.report.wrote(verb, word);
        outcome
    }

    /// A slice is another than we thought: what it is now is read.
    async fn look_again(&mut self, name: &str, uid: &str, error: SliceError) -> Halt {
        match error {
            SliceError::Conflict(_) => self.read(name, uid).await,
            SliceError::NotFound(_) => drop(self.view.deleted(name, uid)),
            SliceError::Refused(_) | SliceError::Away { .. } => return Halt::Failed(error),
        }
        Halt::Overtaken
    }

    /// Reads one slice. Where that fails, the watch tells it later.
    async fn read(&mut self, name: &str, uid: &str) {
        match self.api.get(name).await {
            Ok(found) => self.view.read(name, uid, found),
            Err(error) => tracing::debug!(slice = name, %error, "a slice could not be read"),
        }
    }

    fn halt(&mut self, key: &PoolKey, halt: Halt) {
        let now = Instant::now();
        let pace = &mut self.pool(key, now).pace;
        let problem = match halt {
            Halt::Overtaken => return pace.overtaken(now),
            Halt::Failed(SliceError::Refused(words)) => {
                pace.refused(now);
                let problem = refusal(key, &words);
                self.conditions.set(&key.to_string(), problem.clone());
                problem
            }
            Halt::Failed(SliceError::Away { words, retry_after }) => {
                pace.failed(now, retry_after);
                tracing::debug!(pool = %key, words, "slices could not be written, trying again");
                Problem::unavailable("slices-not-written", words)
            }
            Halt::Failed(SliceError::Conflict(words) | SliceError::NotFound(words)) => {
                pace.failed(now, None);
                Problem::conflict("slices-not-written", words)
            }
        };
        self.tell_problem(key, problem);
    }

    fn cannot_be_told(&mut self, key: &PoolKey, error: &PlanError) {
        let problem = refusal(key, &error.to_string());
        self.conditions.set(&key.to_string(), problem.clone());
        self.tell_problem(key, problem);
    }
}
