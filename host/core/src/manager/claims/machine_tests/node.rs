//! A node without tasks and disks: carries out the machine's decisions as `prepare` and `unprepare` do, with a commit that may
//! fail, drivers that answer as luck has it, and a power cut at any step. Asserts the invariants as it goes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::super::fixtures::{permanent, prepared, transient};
use crate::checkpoint::Change;
use crate::manager::claims::machine::{
    self, DeviceFacts, DriverResult, Holder, PrepareEnd, PrepareRequest, PrepareStep, UnprepareEnd,
    UnprepareStep,
};
use crate::manager::claims::table::{ClaimTable, Undo};
use nodedock_model::{
    AllocatedDevice, Caller, Claim, ClaimRecord, ClaimState, DriverKind, DriverName, LiveClaim, ObjectRef,
    PodRecord, PreparedBy, PreparedClaim, Problem, ReleaseRecord, Uid, limit,
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
    /// Claims that were unprepared by hand.
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

/// Who unprepares claims.
#[derive(Clone, Copy)]
enum Leaving<'a> {
    Pod(&'a Uid),
    /// Of one driver's part, or of all that it holds.
    Kubelet(Option<&'a DriverName>),
    Retry,
}

pub(super) struct Node {
    table: ClaimTable,
    durable: Durable,
    drivers: BTreeMap<DriverName, Driver>,
    facts: BTreeMap<(DriverName, String), DeviceFacts>,
    boot: u32,
    clock_ms: u64,
    luck: VecDeque<Luck>,
    /// What was told of a driver's part of a claim, and in which boot; until it is unprepared.
    answered: BTreeMap<(Uid, DriverName), (u32, PreparedClaim)>,
}

impl Node {
    pub(super) fn new(
        drivers: impl IntoIterator<Item = DriverName>,
        facts: BTreeMap<(DriverName, String), DeviceFacts>,
    ) -> Self {
        let serving = |name| (name, Driver { serves: true, ..Driver::default() });
        Self {
            table: ClaimTable::default(),
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
        self.table = ClaimTable::new(claims, pods);
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
            match self.decide(Holder::Pod(pod), claim) {
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
        standing.iter().for_each(|record| self.answer(record, None));
        self.call_and_finish(work, None)
    }

    /// A kubelet asks for a driver's part; what has to wait is refused at once.
    pub(super) fn kubelet_prepare(&mut self, driver: &DriverName, claim: &Claim) -> Alive<()> {
        let mut undo = Undo::default();
        let (record, work) = match self.decide(Holder::Kubelet { driver, given: false }, claim) {
            PrepareStep::Known { record, changed: false } => {
                self.answer(&record, Some(driver));
                return Ok(());
            }
            PrepareStep::Known { record, changed: true } => (record, None),
            PrepareStep::Call { record, drivers } if self.all_serve(&drivers) => (record, Some(drivers)),
            PrepareStep::Call { .. } | PrepareStep::Wait(_) | PrepareStep::Refuse(_) => return Ok(()),
        };
        undo.put(&mut self.table, &record);
        if !self.commit(vec![Change::PutClaim(record.clone())], undo)? {
            return Ok(());
        }
        let Some(drivers) = work else {
            self.answer(&record, Some(driver));
            return Ok(());
        };
        assert_eq!(drivers, std::slice::from_ref(driver), "no other driver is asked");
        self.call_and_finish(vec![(record, drivers)], Some(driver))
    }

    fn decide(&mut self, holder: Holder<'_>, claim: &Claim) -> PrepareStep {
        let admitted = match holder {
            Holder::Pod(pod) => machine::admit(claim, pod, "node-1"),
            Holder::Kubelet { .. } => machine::admit_for_kubelet(claim, "node-1"),
        };
        let allocation = admitted.expect("every claim is admitted here");
        self.clock_ms += 1;
        let facts = |driver: &DriverName, _: &str, device: &str| {
            let known =
                self.drivers[driver].serves.then(|| self.facts.get(&(driver.clone(), device.to_owned())));
            known.flatten().cloned().unwrap_or_default()
        };
        let (boot_id, now_ms) = (format!("boot-{}", self.boot), self.clock_ms);
        let request = PrepareRequest {
            claim,
            allocation,
            holder,
            facts: &facts,
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

    fn call_and_finish(&mut self, work: Work, part: Option<&DriverName>) -> Alive<()> {
        let (mut prepared, mut kept, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        for (record, drivers) in work {
            let mut results = Vec::new();
            for driver in &drivers {
                results.push(self.call_prepare(driver, &record)?);
            }
            let end = match part {
                Some(driver) => machine::finish_prepare_part(&record, driver, results, self.clock_ms),
                None => machine::finish_prepare(&record, results, self.clock_ms),
            };
            match end {
                PrepareEnd::Prepared(record) => prepared.push(record),
                PrepareEnd::Open(record, _) => kept.push(record),
                PrepareEnd::RolledBack(record, _) => refused.push(record),
            }
        }
        let changed: Vec<_> = prepared.iter().chain(&kept).cloned().collect();
        if self.commit_claims(&changed)? {
            prepared.iter().for_each(|record| self.answer(record, part));
        }
        let roll_back = |record: &Arc<ClaimRecord>| match part {
            Some(driver) => machine::roll_back_part(record, driver, self.clock_ms),
            None => machine::roll_back(record, self.clock_ms),
        };
        let given_up: Work = refused.iter().map(roll_back).collect();
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
        self.unprepare_claims(&uids, Leaving::Pod(pod))
    }

    /// A kubelet unprepares a driver's part, or (`driver` none) all that it holds.
    pub(super) fn kubelet_unprepare(&mut self, uid: &Uid, driver: Option<&DriverName>) -> Alive<()> {
        self.unprepare_claims(std::slice::from_ref(uid), Leaving::Kubelet(driver))
    }

    /// What was being unprepared is tried again.
    pub(super) fn resume(&mut self) -> Alive<()> {
        let open: Vec<_> = self.table.claims().filter(|claim| claim.is_leaving()).cloned().collect();
        for record in open {
            self.unprepare_claims(std::slice::from_ref(&record.id.uid), Leaving::Retry)?;
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
            assert_ne!(record.state, ClaimState::Unpreparing, "no other request unprepares {uid}");
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

    fn unprepare_claims(&mut self, uids: &[Uid], leaver: Leaving<'_>) -> Alive<()> {
        let pod = if let Leaving::Pod(pod) = leaver { Some(pod) } else { None };
        let mut undo = Undo::default();
        let (mut changed, mut work): (Vec<_>, Work) = Default::default();
        for uid in uids {
            let step = match leaver {
                Leaving::Kubelet(driver) => {
                    machine::unprepare_by_kubelet(&self.table, uid, driver, self.clock_ms, "kubelet")
                }
                _ => machine::unprepare(&self.table, uid, pod, self.clock_ms, "unprepare"),
            };
            let (record, drivers) = match step {
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
                UnprepareEnd::Kept(record, _) | UnprepareEnd::Stays(record) => kept.push(record),
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
        assert!(durable.is_part_leaving(name), "the intent is durable");
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
    fn answer(&mut self, record: &Arc<ClaimRecord>, part: Option<&DriverName>) {
        assert_eq!(self.durable.claims.get(&record.id.uid), Some(record), "what is answered is durable");
        match part {
            Some(driver) => assert!(record.drivers[driver].kubelet, "the kubelet holds it"),
            None => assert_eq!(record.state, ClaimState::Prepared),
        }
        for (driver, part) in record.drivers.iter().filter(|(driver, _)| part.is_none_or(|of| of == *driver))
        {
            let now = (self.boot, part.current().unwrap().clone());
            let before = self.answered.insert((record.id.uid.clone(), driver.clone()), now.clone());
            let same = before.is_none_or(|before| before.0 != self.boot || before == now);
            assert!(same, "the same answer again");
        }
    }

    /// What holds whenever nothing is under way.
    pub(super) fn assert_sound(&mut self) {
        // What is unprepared and prepared again may be answered otherwise.
        let stands = |uid: &Uid, driver: &DriverName| {
            let claim = self.durable.claims.get(uid);
            claim.is_some_and(|claim| claim.drivers.contains_key(driver) && !claim.is_part_leaving(driver))
        };
        self.answered.retain(|(uid, driver), _| stands(uid, driver));
        self.assert_drivers_are_known();
        self.assert_devices_are_exclusive();
        let claims: BTreeMap<_, _> = self.table.claims().map(|c| (c.id.uid.clone(), c.clone())).collect();
        assert_eq!(claims, self.durable.claims, "the table says what is durable");
        let pods: BTreeMap<_, _> = self.table.pods().map(|p| (p.pod.uid.clone(), p.clone())).collect();
        assert_eq!(pods, self.durable.pods, "the table says what is durable");
        for claim in claims.values() {
            assert!(claim.timeline.len() <= limit::TIMELINE_MAX);
            assert_held(claim);
            let named = self.table.claim_named(&claim.id.namespace, &claim.id.name);
            assert_eq!(named, Some(claim), "one claim of a name at a time");
        }
    }

    /// No driver holds a device of a claim that no durable record knows to be its, be it that the claim was unprepared without it.
    fn assert_drivers_are_known(&self) {
        for (name, driver) in &self.drivers {
            for uid in driver.holds.iter().chain(&driver.asked) {
                let claim = self.durable.claims.get(uid).is_some_and(|r| r.drivers.contains_key(name));
                assert!(claim || self.is_untold(name, uid), "{name} has {uid}, which no record knows");
            }
        }
    }

    /// Whether the claim was unprepared by hand, and it is durable that the driver was not told.
    fn is_untold(&self, driver: &DriverName, uid: &Uid) -> bool {
        self.durable.released.get(uid).is_some_and(|released| released.untold.contains_key(driver))
    }

    /// No device, and no identity, is in two claims unless both share it: by the allocations, not by what records say they hold.
    fn assert_devices_are_exclusive(&self) {
        let mut users: BTreeMap<String, Vec<(&Uid, bool)>> = BTreeMap::new();
        for (uid, record) in &self.durable.claims {
            let has_part = |device: &&AllocatedDevice| record.drivers.contains_key(&device.driver);
            let devices = record.allocation.devices.iter().filter(has_part);
            for device in devices.filter(|device| !device.admin_access) {
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

/// Every part of a claim has a holder, or is being unprepared.
fn assert_held(claim: &ClaimRecord) {
    let (uid, by_pods) = (&claim.id.uid, !claim.pods.is_empty());
    if claim.state == ClaimState::Unpreparing {
        assert!(!claim.is_held_by_kubelet(), "{uid} leaves though a kubelet holds it");
        return;
    }
    assert!(by_pods || claim.is_held_by_kubelet(), "a holder of {uid}");
    assert!(!claim.is_held_by_kubelet() || claim.kubelet.is_some(), "{uid}: since when, and for whom");
    for (driver, part) in &claim.drivers {
        assert!(!(part.leaving && (by_pods || part.kubelet)), "{driver} of {uid} leaves and is held");
        assert!(by_pods || part.kubelet || part.leaving, "a holder of {driver} of {uid}");
    }
    let open = claim.drivers.values().any(|part| !part.leaving && part.current().is_none());
    assert_eq!(claim.state == ClaimState::Prepared, !open, "the state of {uid} is that of its parts");
    for device in claim.allocation.devices.iter().filter(|_| by_pods) {
        assert!(claim.drivers.contains_key(&device.driver), "a pod holds all of {uid}");
    }
}
