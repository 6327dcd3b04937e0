//! A node without tasks and disks: carries out the machine's decisions as `prepare` and `unprepare` do, with a commit that may
//! fail, drivers that answer as luck has it, and a power cut at any step. Asserts the invariants as it goes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::super::fixtures::{permanent, prepared, transient};
use crate::checkpoint::Change;
use crate::claims::machine::{
    self, DeviceFacts, DriverResult, PrepareEnd, PrepareRequest, PrepareStep, UnprepareEnd, UnprepareStep,
};
use crate::claims::table::{Table, Undo};
use crate::model::{
    Caller, Claim, ClaimRecord, ClaimState, DriverKind, DriverName, LiveClaim, ObjectRef, PodRecord,
    PreparedBy, PreparedClaim, Problem, ReleaseRecord, Uid, limit,
};

/// What happens at the next commit or call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Luck {
    Good,
    /// A commit fails; a driver refuses for good.
    Refused,
    /// A commit fails; a driver refuses for now.
    Later,
    /// A commit fails; a driver acts, and its answer does not come in time.
    TooLateDone,
    /// The daemon dies before it happens.
    CrashBefore,
    /// The daemon dies after it happened.
    CrashAfter,
}

/// The daemon died: nothing but the checkpoint and what drivers hold is left.
pub(super) struct Crash;

type Alive<T> = Result<T, Crash>;
type Work = Vec<(Arc<ClaimRecord>, Vec<DriverName>)>;

/// What a driver holds, and what it has to be told of still.
#[derive(Debug, Default)]
struct Driver {
    serves: bool,
    /// Claims that are in place in the hardware.
    holds: BTreeSet<Uid>,
    /// Claims that it was asked to prepare, and not to unprepare since.
    asked: BTreeSet<Uid>,
    calls: u32,
}

#[derive(Default)]
struct Durable {
    claims: BTreeMap<Uid, Arc<ClaimRecord>>,
    pods: BTreeMap<Uid, Arc<PodRecord>>,
    /// Claims that were given up by hand.
    released: BTreeMap<Uid, Arc<ReleaseRecord>>,
}

impl Durable {
    fn apply(&mut self, change: Change) {
        match change {
            Change::PutClaim(record) => drop(self.claims.insert(record.id.uid.clone(), record)),
            Change::DeleteClaim(uid) => drop(self.claims.remove(&uid)),
            Change::PutPod(record) => drop(self.pods.insert(record.pod.uid.clone(), record)),
            Change::DeletePod(uid) => drop(self.pods.remove(&uid)),
            Change::PutReleased(record) => drop(self.released.insert(record.id.uid.clone(), record)),
            Change::DeleteReleased(_) => unreachable!("there is room for all"),
            Change::PutAllocation(_) | Change::DeleteAllocation(_) => unreachable!("not the claim manager's"),
            Change::PutValues(_) | Change::DeleteValues(_) => unreachable!("no driver of these writes"),
        }
    }
}

pub(super) struct Node {
    table: Table,
    durable: Durable,
    drivers: BTreeMap<DriverName, Driver>,
    facts: BTreeMap<(DriverName, String), DeviceFacts>,
    boot: u32,
    clock_ms: u64,
    luck: VecDeque<Luck>,
    /// What pods were told of a claim, and in which boot; until it is given up.
    answered: BTreeMap<Uid, (u32, Vec<PreparedClaim>)>,
}

impl Node {
    pub(super) fn new(
        drivers: impl IntoIterator<Item = DriverName>,
        facts: BTreeMap<(DriverName, String), DeviceFacts>,
    ) -> Self {
        let serving = |name| (name, Driver { serves: true, ..Driver::default() });
        Self {
            table: Table::default(),
            durable: Durable::default(),
            drivers: drivers.into_iter().map(serving).collect(),
            facts,
            boot: 1,
            clock_ms: 0,
            luck: VecDeque::new(),
            answered: BTreeMap::new(),
        }
    }

    pub(super) fn set_luck(&mut self, luck: &[Luck]) {
        self.luck = luck.iter().copied().collect();
    }

    pub(super) fn set_serving(&mut self, driver: &DriverName, serves: bool) {
        self.drivers.get_mut(driver).unwrap().serves = serves;
    }

    pub(super) fn serve_all(&mut self) {
        self.drivers.values_mut().for_each(|driver| driver.serves = true);
    }

    /// The daemon starts again from what is durable.
    pub(super) fn restart(&mut self) {
        let claims = self.durable.claims.values().map(|record| ClaimRecord::clone(record)).collect();
        let pods = self.durable.pods.values().map(|record| PodRecord::clone(record)).collect();
        self.table = Table::new(claims, pods);
    }

    /// The machine starts again: what lived in the kernel is gone.
    pub(super) fn reboot(&mut self) {
        self.boot += 1;
        self.drivers.values_mut().for_each(|driver| driver.holds.clear());
        self.restart();
    }

    pub(super) fn pods(&self) -> Vec<Uid> {
        let of_claims = self.durable.claims.values().flat_map(|claim| claim.pods.keys());
        let pods: BTreeSet<_> = self.durable.pods.keys().chain(of_claims).cloned().collect();
        pods.into_iter().collect()
    }

    /// A pod asks for claims; those that have to wait are refused at once.
    pub(super) fn prepare(&mut self, pod: &ObjectRef, claims: &BTreeMap<Uid, &Claim>) -> Alive<()> {
        let mut undo = Undo::default();
        let (mut standing, mut changed, mut work): (Vec<_>, Vec<_>, Work) = Default::default();
        for claim in claims.values() {
            match self.decide(pod, claim) {
                PrepareStep::Known { record, changed: false } => standing.push(record),
                PrepareStep::Known { record, changed: true } => {
                    undo.put(&mut self.table, &record);
                    changed.push(record.clone());
                    standing.push(record);
                }
                PrepareStep::Call { record, drivers } if self.all_serve(&drivers) => {
                    undo.put(&mut self.table, &record);
                    changed.push(record.clone());
                    work.push((record, drivers));
                }
                PrepareStep::Call { .. } | PrepareStep::Wait(_) | PrepareStep::Refuse(_) => {}
            }
        }
        let accepted = standing.iter().chain(work.iter().map(|(record, _)| record));
        let accepted: BTreeMap<_, _> = accepted.map(|r| (r.id.uid.to_string(), r.id.clone())).collect();
        if accepted.is_empty() {
            return Ok(());
        }
        let pod_record = Arc::new(machine::pod_record(&self.table, pod, &[], accepted));
        undo.put_pod(&mut self.table, &pod_record);
        let claims = changed.into_iter().map(Change::PutClaim);
        if !self.commit(claims.chain([Change::PutPod(pod_record)]).collect(), undo)? {
            return Ok(());
        }
        standing.iter().for_each(|record| self.answer(record));
        self.call_and_finish(work)
    }

    fn decide(&mut self, pod: &ObjectRef, claim: &Claim) -> PrepareStep {
        let allocation = machine::admit(claim, pod, "node-1").expect("every pod may have every claim here");
        let holds = machine::holds(allocation, |driver, _, device| {
            let known =
                self.drivers[driver].serves.then(|| self.facts.get(&(driver.clone(), device.to_owned())));
            known.flatten().cloned().unwrap_or_default()
        });
        self.clock_ms += 1;
        let (boot_id, now_ms) = (format!("boot-{}", self.boot), self.clock_ms);
        let request = PrepareRequest {
            claim,
            allocation,
            pod,
            holds,
            moved: &[],
            boot_id: &boot_id,
            now_ms,
            cause: "prepare",
        };
        machine::prepare(&self.table, &request)
    }

    fn all_serve(&self, drivers: &[DriverName]) -> bool {
        drivers.iter().all(|driver| self.drivers[driver].serves)
    }

    fn call_and_finish(&mut self, work: Work) -> Alive<()> {
        let (mut prepared, mut kept, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        for (record, drivers) in work {
            let mut results = Vec::new();
            for driver in &drivers {
                results.push(self.call_prepare(driver, &record)?);
            }
            match machine::finish_prepare(&record, results, self.clock_ms) {
                PrepareEnd::Prepared(record) => prepared.push(record),
                PrepareEnd::Open(record, _) => kept.push(record),
                PrepareEnd::RolledBack(record, _) => refused.push(record),
            }
        }
        let changed: Vec<_> = prepared.iter().chain(&kept).cloned().collect();
        if self.commit_claims(&changed)? {
            prepared.iter().for_each(|record| self.answer(record));
        }
        let given_up: Work = refused.iter().map(|record| machine::roll_back(record, self.clock_ms)).collect();
        let records: Vec<_> = given_up.iter().map(|(record, _)| record.clone()).collect();
        if self.commit_claims(&records)? { self.call_and_forget(given_up) } else { Ok(()) }
    }

    /// A pod leaves.
    pub(super) fn unprepare(&mut self, pod: &Uid) -> Alive<()> {
        let claims = self.table.claims_of_pod(pod.as_str());
        let uids: Vec<_> = claims.iter().map(|claim| claim.id.uid.clone()).collect();
        if uids.is_empty() {
            return self.forget(&[], &BTreeSet::from([pod.clone()]));
        }
        self.give_up(&uids, Some(pod))
    }

    /// What was being given up is tried again.
    pub(super) fn resume(&mut self) -> Alive<()> {
        let open: Vec<_> =
            self.table.claims().filter(|c| c.state == ClaimState::Unpreparing).cloned().collect();
        for record in open {
            self.give_up(std::slice::from_ref(&record.id.uid), None)?;
            if self.table.claim(record.id.uid.as_str()).is_none() {
                self.forget(&[], &record.pods.keys().cloned().collect())?;
            }
        }
        Ok(())
    }

    /// An operator gives a claim up by hand.
    pub(super) fn release(&mut self, uid: &Uid) -> Alive<()> {
        let Some(record) = self.table.claim(uid.as_str()).cloned() else { return Ok(()) };
        if machine::check_release(&record).is_err() {
            assert_ne!(record.state, ClaimState::Unpreparing, "nobody else would give {uid} up");
            return Ok(());
        }
        let by = Caller { uid: Some(0), user: None, pid: None };
        let (record, drivers) = machine::release(&record, self.clock_ms, &by);
        if !self.commit_claims(std::slice::from_ref(&record))? {
            return Ok(());
        }
        let mut results = Vec::new();
        for driver in &drivers {
            let live = record.live_claim(driver).expect("a driver of the record");
            results.push((driver.clone(), self.call_unprepare(driver, &live)?, 0));
        }
        let agreed: Vec<_> = results.iter().filter(|(_, end, _)| end.is_ok()).map(|r| r.0.clone()).collect();
        let released = Arc::new(machine::released(&record, results, self.clock_ms, &by));
        for driver in &drivers {
            assert_ne!(agreed.contains(driver), released.untold.contains_key(driver), "{driver} of {uid}");
        }
        let pods = record.pods.keys().cloned().collect();
        self.forget_with(std::slice::from_ref(uid), &pods, vec![Change::PutReleased(released)])
    }

    /// A pod that holds nothing of a claim cannot take it away.
    pub(super) fn assert_strangers_take_nothing(&self, pod: &Uid) {
        for claim in self.table.claims().filter(|claim| !claim.pods.contains_key(pod)) {
            let step = machine::unprepare(&self.table, &claim.id.uid, Some(pod), 0, "unprepare");
            assert_eq!(step, UnprepareStep::Nothing);
        }
    }

    fn give_up(&mut self, uids: &[Uid], pod: Option<&Uid>) -> Alive<()> {
        let mut undo = Undo::default();
        let (mut changed, mut work): (Vec<_>, Work) = Default::default();
        for uid in uids {
            let (record, drivers) =
                match machine::unprepare(&self.table, uid, pod, self.clock_ms, "unprepare") {
                    UnprepareStep::Nothing => continue,
                    UnprepareStep::Left(record) => (record, None),
                    UnprepareStep::Call { record, drivers } => (record, Some(drivers)),
                };
            undo.put(&mut self.table, &record);
            changed.push(Change::PutClaim(record.clone()));
            work.extend(drivers.map(|drivers| (record, drivers)));
        }
        let leaves = pod.filter(|pod| self.table.claims_of_pod(pod.as_str()).is_empty());
        if let Some(pod) = leaves {
            undo.remove_pod(&mut self.table, pod);
            changed.push(Change::DeletePod(pod.clone()));
        }
        if self.commit(changed, undo)? { self.call_and_forget(work) } else { Ok(()) }
    }

    fn call_and_forget(&mut self, work: Work) -> Alive<()> {
        let (mut gone, mut kept) = (Vec::new(), Vec::new());
        for (record, drivers) in work {
            let mut results = Vec::new();
            for driver in &drivers {
                let live = record.live_claim(driver).expect("a driver of the record");
                results.push((driver.clone(), self.call_unprepare(driver, &live)?, 0));
            }
            match machine::finish_unprepare(&record, results, self.clock_ms) {
                UnprepareEnd::Gone => gone.push(record),
                UnprepareEnd::Kept(record, _) => kept.push(record),
            }
        }
        self.commit_claims(&kept)?;
        let uids: Vec<_> = gone.iter().map(|record| record.id.uid.clone()).collect();
        self.forget(&uids, &gone.iter().flat_map(|record| record.pods.keys().cloned()).collect())
    }

    fn forget(&mut self, uids: &[Uid], pods: &BTreeSet<Uid>) -> Alive<()> {
        self.forget_with(uids, pods, Vec::new())
    }

    fn forget_with(&mut self, uids: &[Uid], pods: &BTreeSet<Uid>, mut changes: Vec<Change>) -> Alive<()> {
        let pods = self.table.pods_with_nothing_but(pods, uids);
        changes.extend(uids.iter().cloned().map(Change::DeleteClaim));
        changes.extend(pods.iter().map(|pod| Change::DeletePod((*pod).clone())));
        if self.commit(changes, Undo::default())? {
            uids.iter().for_each(|uid| drop(self.table.remove(uid)));
            pods.iter().for_each(|pod| drop(self.table.remove_pod(pod.as_str())));
        }
        Ok(())
    }

    /// False: it failed, and the table is as it was.
    fn commit(&mut self, changes: Vec<Change>, undo: Undo) -> Alive<bool> {
        if changes.is_empty() {
            return Ok(true);
        }
        let luck = self.luck.pop_front().unwrap_or(Luck::Good);
        if matches!(luck, Luck::Good | Luck::CrashAfter) {
            changes.into_iter().for_each(|change| self.durable.apply(change));
        }
        match luck {
            Luck::Good => Ok(true),
            Luck::CrashBefore | Luck::CrashAfter => Err(Crash),
            _ => {
                undo.restore(&mut self.table);
                Ok(false)
            }
        }
    }

    fn commit_claims(&mut self, records: &[Arc<ClaimRecord>]) -> Alive<bool> {
        let mut undo = Undo::default();
        records.iter().for_each(|record| undo.put(&mut self.table, record));
        self.commit(records.iter().cloned().map(Change::PutClaim).collect(), undo)
    }

    fn call_prepare(&mut self, name: &DriverName, record: &ClaimRecord) -> Alive<DriverResult> {
        let uid = &record.id.uid;
        let durable =
            self.durable.claims.get(uid).expect("nothing is asked of a driver before the intent is durable");
        assert_eq!(durable.state, ClaimState::Preparing, "the intent is durable");
        assert!(
            durable.drivers[name].current().is_none(),
            "what is prepared and durable is not asked for again"
        );
        let luck = self.luck.pop_front().unwrap_or(Luck::Good);
        let driver = self.drivers.get_mut(name).unwrap();
        driver.calls += 1;
        if luck != Luck::CrashBefore {
            driver.asked.insert(uid.clone());
        }
        if matches!(luck, Luck::Good | Luck::TooLateDone | Luck::CrashAfter) {
            driver.holds.insert(uid.clone());
        }
        let memo = format!("boot-{} call {}", self.boot, driver.calls);
        let outcome = match luck {
            Luck::Good => Ok(prepared(&record.driver_claim(name).devices, &memo)),
            Luck::Refused => Err(permanent()),
            Luck::Later | Luck::TooLateDone => Err(transient()),
            Luck::CrashBefore | Luck::CrashAfter => return Err(Crash),
        };
        let by = PreparedBy { kind: DriverKind::Wasm, version: "1.0.0".to_owned(), digest: String::new() };
        Ok(DriverResult { driver: name.clone(), by: Some(by), outcome, duration_us: 1 })
    }

    fn call_unprepare(&mut self, name: &DriverName, live: &LiveClaim) -> Alive<Result<(), Problem>> {
        let uid = &live.claim.id.uid;
        let durable = self.durable.claims.get(uid).expect("an unprepare is of a claim that is durable");
        assert_eq!(durable.state, ClaimState::Unpreparing, "the intent is durable");
        let memo = String::from_utf8(live.memo.clone()).unwrap();
        let memo_boot = memo.split_once(' ').map(|(boot, _)| boot);
        assert!(memo_boot.is_none_or(|boot| boot == live.boot_id), "memo of {memo:?}, told {}", live.boot_id);
        let driver = self.drivers.get_mut(name).unwrap();
        if !driver.serves {
            return Ok(Err(transient()));
        }
        let luck = self.luck.pop_front().unwrap_or(Luck::Good);
        if matches!(luck, Luck::Good | Luck::TooLateDone | Luck::CrashAfter) {
            driver.holds.remove(uid);
            driver.asked.remove(uid);
        }
        match luck {
            Luck::Good => Ok(Ok(())),
            Luck::Refused => Ok(Err(permanent())),
            Luck::Later | Luck::TooLateDone => Ok(Err(transient())),
            Luck::CrashBefore | Luck::CrashAfter => Err(Crash),
        }
    }

    /// Nothing is answered that is not durable, and a repeated request gives the same answer.
    fn answer(&mut self, record: &Arc<ClaimRecord>) {
        assert_eq!(self.durable.claims.get(&record.id.uid), Some(record), "what is answered is durable");
        assert_eq!(record.state, ClaimState::Prepared);
        let answer: Vec<_> = record.drivers.values().map(|part| part.current().unwrap().clone()).collect();
        let now = (self.boot, answer);
        let before = self.answered.insert(record.id.uid.clone(), now.clone());
        assert!(before.is_none_or(|before| before.0 != self.boot || before == now), "the same answer again");
    }

    /// What holds whenever nothing is under way.
    pub(super) fn assert_sound(&mut self) {
        // What is given up and prepared again may be answered otherwise.
        let prepared =
            |uid: &Uid| self.durable.claims.get(uid).is_some_and(|c| c.state != ClaimState::Unpreparing);
        self.answered.retain(|uid, _| prepared(uid));
        self.assert_drivers_are_known();
        self.assert_devices_are_exclusive();
        let claims: BTreeMap<_, _> = self.table.claims().map(|c| (c.id.uid.clone(), c.clone())).collect();
        assert_eq!(claims, self.durable.claims, "the table says what is durable");
        let pods: BTreeMap<_, _> = self.table.pods().map(|p| (p.pod.uid.clone(), p.clone())).collect();
        assert_eq!(pods, self.durable.pods, "the table says what is durable");
        for claim in claims.values() {
            assert!(claim.timeline.len() <= limit::TIMELINE_MAX);
            assert!(!claim.pods.is_empty(), "somebody holds {}", claim.id.uid);
            let named = self.table.claim_named(&claim.id.namespace, &claim.id.name);
            assert_eq!(named, Some(claim), "one claim of a name at a time");
        }
    }

    /// No driver holds a device of a claim that no durable record knows to be its, be it that the claim was given up without it.
    fn assert_drivers_are_known(&self) {
        for (name, driver) in &self.drivers {
            for uid in driver.holds.iter().chain(&driver.asked) {
                let claim = self.durable.claims.get(uid).is_some_and(|r| r.drivers.contains_key(name));
                assert!(claim || self.is_untold(name, uid), "{name} has {uid}, and nobody knows");
            }
        }
    }

    /// Whether the claim was given up by hand, and it is durable that the driver was not told.
    fn is_untold(&self, driver: &DriverName, uid: &Uid) -> bool {
        self.durable.released.get(uid).is_some_and(|released| released.untold.contains_key(driver))
    }

    /// No device, and no identity, is in two claims unless both share it: by the allocations, not by what records say they hold.
    fn assert_devices_are_exclusive(&self) {
        let mut users: BTreeMap<String, Vec<(&Uid, bool)>> = BTreeMap::new();
        for (uid, record) in &self.durable.claims {
            for device in record.allocation.devices.iter().filter(|device| !device.admin_access) {
                let key = (device.driver.clone(), device.device.to_string());
                let facts = self.facts.get(&key).cloned().unwrap_or_default();
                let shared = device.share_id.is_some() || facts.allow_multiple_allocations;
                let keys = facts.identity.into_iter().chain([format!("{}/{}", key.0, key.1)]);
                keys.for_each(|key| users.entry(key).or_default().push((uid, shared)));
            }
        }
        for (key, users) in users {
            let several = users.iter().any(|(uid, _)| *uid != users[0].0);
            assert!(!several || users.iter().all(|(_, shared)| *shared), "{key} is in two claims: {users:?}");
        }
    }

    pub(super) fn assert_empty(&self) {
        assert!(
            self.durable.claims.is_empty() && self.durable.pods.is_empty(),
            "nothing is left in the checkpoint"
        );
        for (name, driver) in &self.drivers {
            let mut left = driver.holds.iter().chain(&driver.asked);
            assert!(left.all(|uid| self.is_untold(name, uid)), "{name} was told of everything: {driver:?}");
        }
    }
}
