//! A node without tasks and disks: carries out the machine's decisions as `prepare` and `unprepare` do, with a commit that may
//! fail, drivers with generated outcomes, and a power cut at any step. Asserts the invariants as it goes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::super::fixtures::{permanent, prepared, transient};
use super::requests::{Facts, assert_devices_are_exclusive, facts};
use crate::checkpoint::Change;
use crate::manager::claims::machine::{
    self, DriverResult, Holder, PrepareEnd, PrepareRequest, PrepareStep, UnprepareEnd,
    UnprepareRequest, UnprepareStep,
};
use crate::records::table::{ClaimTable, Undo};
use nodedock_model::{
    Caller, Claim, ClaimRecord, ClaimState, DriverClaimRecord, DriverKind, DriverName, PodRecord,
    PreparedBy, PreparedClaim, Problem, ReleaseRecord, Uid, limit,
};

/// Outcome of the next commit or call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EffectOutcome {
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

/// The claims of a driver.
#[derive(Debug, Default)]
struct Driver {
    serves: bool,
    /// Claims that are in place in the hardware.
    holds: BTreeSet<Uid>,
    /// Claims that it was called to prepare, and has not unprepared since.
    called: BTreeSet<Uid>,
    calls: u32,
}

#[derive(Default)]
struct Durable {
    claims: BTreeMap<Uid, Arc<ClaimRecord>>,
    pods: BTreeMap<Uid, Arc<PodRecord>>,
    /// Claims that were released by force.
    released: BTreeMap<Uid, Arc<ReleaseRecord>>,
}

impl Durable {
    fn apply(&mut self, change: Change) {
        match change {
            Change::PutClaim(record) => drop(self.claims.insert(record.id.uid.clone(), record)),
            Change::DeleteClaim(uid) => drop(self.claims.remove(&uid)),
            Change::PutPod(record) => drop(self.pods.insert(record.pod.uid.clone(), record)),
            Change::DeletePod(uid) => drop(self.pods.remove(&uid)),
            Change::PutReleased(record) => {
                drop(self.released.insert(record.id.uid.clone(), record))
            }
            change => unreachable!("the claim machine writes claims and pods: {change:?}"),
        }
    }
}

pub(super) struct Node {
    table: ClaimTable,
    durable: Durable,
    drivers: BTreeMap<DriverName, Driver>,
    facts: Facts,
    boot: u32,
    clock_ms: u64,
    outcomes: VecDeque<EffectOutcome>,
    /// The answer for a driver's part of a claim, and its boot; until it is unprepared.
    answered: BTreeMap<(Uid, DriverName), (u32, PreparedClaim)>,
}

impl Node {
    pub(super) fn new(drivers: impl IntoIterator<Item = DriverName>) -> Self {
        let serving = |name| {
            (
                name,
                Driver {
                    serves: true,
                    ..Driver::default()
                },
            )
        };
        Self {
            table: ClaimTable::default(),
            durable: Durable::default(),
            drivers: drivers.into_iter().map(serving).collect(),
            facts: facts(),
            boot: 1,
            clock_ms: 0,
            outcomes: VecDeque::new(),
            answered: BTreeMap::new(),
        }
    }

    pub(super) fn set_outcomes(&mut self, outcomes: &[EffectOutcome]) {
        self.outcomes = outcomes.iter().copied().collect();
    }

    pub(super) fn set_serving(&mut self, driver: &DriverName, serves: bool) {
        self.drivers.get_mut(driver).unwrap().serves = serves;
    }

    /// The daemon starts again from what is durable.
    pub(super) fn restart(&mut self) {
        let claims = self
            .durable
            .claims
            .values()
            .map(|record| ClaimRecord::clone(record))
            .collect();
        let pods = self
            .durable
            .pods
            .values()
            .map(|record| PodRecord::clone(record))
            .collect();
        self.table = ClaimTable::new(claims, pods);
    }

    /// The machine starts again: what lived in the kernel is gone.
    pub(super) fn reboot(&mut self) {
        self.boot += 1;
        self.drivers
            .values_mut()
            .for_each(|driver| driver.holds.clear());
        self.restart();
    }

    pub(super) fn pods(&self) -> Vec<Uid> {
        let of_claims = self
            .durable
            .claims
            .values()
            .flat_map(|claim| claim.pods.keys());
        let pods: BTreeSet<_> = self.durable.pods.keys().chain(of_claims).cloned().collect();
        pods.into_iter().collect()
    }

    /// A pod requests claims, or a kubelet a part of one; those that have to wait are refused at once.
    pub(super) fn prepare(&mut self, holder: Holder<'_>, claims: &[&Claim]) -> Alive<()> {
        let part = holder.part();
        let mut undo = Undo::default();
        let (mut known, mut changes, mut work): (Vec<_>, Vec<_>, Work) = Default::default();
        for claim in claims {
            let (record, drivers) = match self.decide(holder, claim) {
                PrepareStep::Known {
                    record,
                    changed: false,
                } => {
                    known.push(record);
                    continue;
                }
                PrepareStep::Known {
                    record,
                    changed: true,
                } => (record, None),
                PrepareStep::Call { record, drivers } if self.all_serve(&drivers) => {
                    (record, Some(drivers))
                }
                PrepareStep::Call { .. } | PrepareStep::Wait { .. } | PrepareStep::Refuse(_) => {
                    continue;
                }
            };
            undo.put(&mut self.table, &record);
            changes.push(Change::PutClaim(record.clone()));
            let Some(drivers) = drivers else {
                known.push(record);
                continue;
            };
            assert!(
                part.is_none_or(|part| drivers == std::slice::from_ref(part)),
                "no other driver is called"
            );
            work.push((record, drivers));
        }
        let accepted = known.iter().chain(work.iter().map(|(record, _)| record));
        let accepted: BTreeMap<_, _> = accepted
            .map(|r| (r.id.uid.to_string(), r.id.clone()))
            .collect();
        if accepted.is_empty() {
            return Ok(());
        }
        if let Holder::Pod(pod) = holder {
            let pod_record = Arc::new(machine::pod_record(&self.table, pod, &[], accepted));
            undo.put_pod(&mut self.table, &pod_record);
            changes.push(Change::PutPod(pod_record));
        }
        if !self.commit(changes, undo)? {
            return Ok(());
        }
        known.iter().for_each(|record| self.answer(record, part));
        self.call_and_finish(work, part)
    }

    fn decide(&mut self, holder: Holder<'_>, claim: &Claim) -> PrepareStep {
        let admitted = match holder {
            Holder::Pod(pod) => machine::admit(claim, pod, None, "node-1"),
            Holder::Kubelet { .. } | Holder::Early { .. } => {
                machine::admit_for_kubelet(claim, "node-1")
            }
        };
        let allocation = admitted.expect("every claim is admitted here");
        self.clock_ms += 1;
        let facts = |driver: &DriverName, _: &str, device: &str| {
            let known = self.drivers[driver]
                .serves
                .then(|| self.facts.get(&(driver.clone(), device.to_owned())));
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
        };
        machine::prepare(&self.table, &request)
    }

    fn all_serve(&self, drivers: &[DriverName]) -> bool {
        drivers.iter().all(|driver| self.drivers[driver].serves)
    }

    fn call_and_finish(&mut self, work: Work, part: Option<&DriverName>) -> Alive<()> {
        let (mut prepared, mut open, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        for (record, drivers) in work {
            let mut results = Vec::new();
            for driver in &drivers {
                results.push(self.call_prepare(driver, &record)?);
            }
            match machine::finish_prepare(&record, part, results, self.clock_ms) {
                PrepareEnd::Prepared(record) => prepared.push(record),
                PrepareEnd::Open(record, _) => open.push(record),
                PrepareEnd::RolledBack(record, _) => refused.push(record),
            }
        }
        let changed: Vec<_> = prepared.iter().chain(&open).cloned().collect();
        if self.commit_claims(&changed)? {
            prepared.iter().for_each(|record| self.answer(record, part));
        }
        let roll_back =
            |record: &Arc<ClaimRecord>| machine::roll_back(record, part, None, self.clock_ms);
        let rolled_back: Work = refused.iter().map(roll_back).collect();
        let records: Vec<_> = rolled_back
            .iter()
            .map(|(record, _)| record.clone())
            .collect();
        if self.commit_claims(&records)? {
            self.call_and_forget(rolled_back)
        } else {
            Ok(())
        }
    }

    /// A pod leaves.
    pub(super) fn unprepare(&mut self, pod: &Uid) -> Alive<()> {
        let claims = self.table.claims_of_pod(pod.as_str());
        let uids: Vec<_> = claims.iter().map(|claim| claim.id.uid.clone()).collect();
        if uids.is_empty() {
            return self.forget(&[], &BTreeSet::from([pod.clone()]));
        }
        self.unprepare_claims(&uids, UnprepareRequest::Pod(pod))
    }

    /// Retries the unprepares that were begun.
    pub(super) fn resume(&mut self) -> Alive<()> {
        let open: Vec<_> = self
            .table
            .claims()
            .filter(|claim| claim.is_leaving())
            .cloned()
            .collect();
        for record in open {
            self.unprepare_claims(
                std::slice::from_ref(&record.id.uid),
                UnprepareRequest::Retry,
            )?;
            if self.table.claim(record.id.uid.as_str()).is_none() {
                self.forget(&[], &record.pods.keys().cloned().collect())?;
            }
        }
        Ok(())
    }

    /// An operator releases a claim by force.
    pub(super) fn release(&mut self, uid: &Uid) -> Alive<()> {
        let Some(record) = self.table.claim(uid.as_str()).cloned() else {
            return Ok(());
        };
        if machine::check_release(&record).is_err() {
            assert_ne!(
                record.state,
                ClaimState::Unpreparing,
                "no other request unprepares {uid}"
            );
            return Ok(());
        }
        let by = Caller {
            uid: Some(0),
            user: None,
            pid: None,
        };
        let (record, drivers) = machine::release(&record, self.clock_ms, &by);
        if !self.commit_claims(std::slice::from_ref(&record))? {
            return Ok(());
        }
        let results = self.call_unprepare_each(&record, &drivers)?;
        let agreed: Vec<_> = results
            .iter()
            .filter(|(_, end, _)| end.is_ok())
            .map(|r| r.0.clone())
            .collect();
        let released = Arc::new(machine::released(&record, results, self.clock_ms, &by));
        for driver in &drivers {
            assert_ne!(
                agreed.contains(driver),
                released.untold.contains_key(driver),
                "{driver} of {uid}"
            );
        }
        let pods = record.pods.keys().cloned().collect();
        self.forget_with(
            std::slice::from_ref(uid),
            &pods,
            vec![Change::PutReleased(released)],
        )
    }

    /// A pod cannot unprepare a claim that it does not use, and without an intent there is no retry.
    pub(super) fn assert_others_take_nothing(&self, pod: &Uid) {
        for claim in self.table.claims() {
            for (by, has_intent) in [
                (UnprepareRequest::Pod(pod), claim.pods.contains_key(pod)),
                (UnprepareRequest::Retry, claim.is_leaving()),
            ] {
                let step = machine::unprepare(&self.table, &claim.id.uid, by, 0);
                assert_eq!(step == UnprepareStep::Nothing, !has_intent, "{by:?}");
            }
        }
    }

    pub(super) fn unprepare_claims(&mut self, uids: &[Uid], by: UnprepareRequest<'_>) -> Alive<()> {
        let pod = if let UnprepareRequest::Pod(pod) = by {
            Some(pod)
        } else {
            None
        };
        let mut undo = Undo::default();
        let (mut changed, mut work): (Vec<_>, Work) = Default::default();
        for uid in uids {
            let step = machine::unprepare(&self.table, uid, by, self.clock_ms);
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
        if self.commit(changed, undo)? {
            self.call_and_forget(work)
        } else {
            Ok(())
        }
    }

    fn call_and_forget(&mut self, work: Work) -> Alive<()> {
        let (mut gone, mut rest) = (Vec::new(), Vec::new());
        for (record, drivers) in work {
            let results = self.call_unprepare_each(&record, &drivers)?;
            match machine::finish_unprepare(&record, results, self.clock_ms) {
                UnprepareEnd::Gone => gone.push(record),
                UnprepareEnd::Stays(record, _) => rest.push(record),
            }
        }
        self.commit_claims(&rest)?;
        let uids: Vec<_> = gone.iter().map(|record| record.id.uid.clone()).collect();
        self.forget(
            &uids,
            &gone
                .iter()
                .flat_map(|record| record.pods.keys().cloned())
                .collect(),
        )
    }

    fn forget(&mut self, uids: &[Uid], pods: &BTreeSet<Uid>) -> Alive<()> {
        self.forget_with(uids, pods, Vec::new())
    }

    fn forget_with(
        &mut self,
        uids: &[Uid],
        pods: &BTreeSet<Uid>,
        mut changes: Vec<Change>,
    ) -> Alive<()> {
        let pods = self.table.pods_with_nothing_but(pods, uids);
        changes.extend(uids.iter().cloned().map(Change::DeleteClaim));
        changes.extend(pods.iter().map(|pod| Change::DeletePod((*pod).clone())));
        if self.commit(changes, Undo::default())? {
            uids.iter().for_each(|uid| drop(self.table.remove(uid)));
            pods.iter()
                .for_each(|pod| drop(self.table.remove_pod(pod.as_str())));
        }
        Ok(())
    }

    /// False: it failed, and the table is as it was.
    fn commit(&mut self, changes: Vec<Change>, undo: Undo) -> Alive<bool> {
        if changes.is_empty() {
            return Ok(true);
        }
        let effect = self.outcomes.pop_front().unwrap_or(EffectOutcome::Good);
        if matches!(effect, EffectOutcome::Good | EffectOutcome::CrashAfter) {
            changes
                .into_iter()
                .for_each(|change| self.durable.apply(change));
        }
        match effect {
            EffectOutcome::Good => Ok(true),
            EffectOutcome::CrashBefore | EffectOutcome::CrashAfter => Err(Crash),
            _ => {
                undo.restore(&mut self.table);
                Ok(false)
            }
        }
    }

    fn commit_claims(&mut self, records: &[Arc<ClaimRecord>]) -> Alive<bool> {
        let mut undo = Undo::default();
        records
            .iter()
            .for_each(|record| undo.put(&mut self.table, record));
        self.commit(
            records.iter().cloned().map(Change::PutClaim).collect(),
            undo,
        )
    }

    fn call_prepare(&mut self, name: &DriverName, record: &ClaimRecord) -> Alive<DriverResult> {
        let uid = &record.id.uid;
        let durable = self
            .durable
            .claims
            .get(uid)
            .expect("no driver is called before the intent is durable");
        assert_eq!(
            durable.state,
            ClaimState::Preparing,
            "the intent is durable"
        );
        assert!(
            durable.drivers[name].current().is_none(),
            "no driver is called for a part that is prepared and durable"
        );
        let effect = self.outcomes.pop_front().unwrap_or(EffectOutcome::Good);
        let driver = self.drivers.get_mut(name).unwrap();
        driver.calls += 1;
        if effect != EffectOutcome::CrashBefore {
            driver.called.insert(uid.clone());
        }
        if matches!(
            effect,
            EffectOutcome::Good | EffectOutcome::TooLateDone | EffectOutcome::CrashAfter
        ) {
            driver.holds.insert(uid.clone());
        }
        let memo = format!("boot-{} call {}", self.boot, driver.calls);
        let outcome = match effect {
            EffectOutcome::Good => Ok(prepared(&record.driver_claim(name).devices, &memo)),
            EffectOutcome::Refused => Err(permanent()),
            EffectOutcome::Later | EffectOutcome::TooLateDone => Err(transient()),
            EffectOutcome::CrashBefore | EffectOutcome::CrashAfter => return Err(Crash),
        };
        let by = PreparedBy {
            kind: DriverKind::Wasm,
            version: "1.0.0".to_owned(),
            digest: String::new(),
            lists: false,
        };
        Ok(DriverResult {
            driver: name.clone(),
            by: Some(by),
            outcome,
            duration_us: 1,
        })
    }

    fn call_unprepare_each(
        &mut self,
        record: &ClaimRecord,
        drivers: &[DriverName],
    ) -> Alive<Vec<machine::UnprepareResult>> {
        let mut results = Vec::new();
        for driver in drivers {
            let live = record
                .driver_record(driver)
                .expect("a driver of the record");
            results.push((driver.clone(), self.call_unprepare(driver, &live)?, 0));
        }
        Ok(results)
    }

    fn call_unprepare(
        &mut self,
        name: &DriverName,
        live: &DriverClaimRecord,
    ) -> Alive<Result<(), Problem>> {
        let uid = &live.claim.id.uid;
        let durable = self
            .durable
            .claims
            .get(uid)
            .expect("an unprepare is of a claim that is durable");
        assert!(durable.is_part_leaving(name), "the intent is durable");
        let memo = String::from_utf8(live.memo.clone()).unwrap();
        let memo_boot = memo.split_once(' ').map(|(boot, _)| boot);
        assert!(
            memo_boot.is_none_or(|boot| boot == live.boot_id),
            "memo {memo:?}, boot {}",
            live.boot_id
        );
        let driver = self.drivers.get_mut(name).unwrap();
        if !driver.serves {
            return Ok(Err(transient()));
        }
        let effect = self.outcomes.pop_front().unwrap_or(EffectOutcome::Good);
        if matches!(
            effect,
            EffectOutcome::Good | EffectOutcome::TooLateDone | EffectOutcome::CrashAfter
        ) {
            driver.holds.remove(uid);
            driver.called.remove(uid);
        }
        match effect {
            EffectOutcome::Good => Ok(Ok(())),
            EffectOutcome::Refused => Ok(Err(permanent())),
            EffectOutcome::Later | EffectOutcome::TooLateDone => Ok(Err(transient())),
            EffectOutcome::CrashBefore | EffectOutcome::CrashAfter => Err(Crash),
        }
    }

    /// Nothing is answered that is not durable, and a repeated request gives the same answer.
    fn answer(&mut self, record: &Arc<ClaimRecord>, part: Option<&DriverName>) {
        assert_eq!(
            self.durable.claims.get(&record.id.uid),
            Some(record),
            "what is answered is durable"
        );
        match part {
            Some(driver) => assert!(record.drivers[driver].kubelet, "the kubelet holds it"),
            None => assert_eq!(record.state, ClaimState::Prepared),
        }
        for (driver, part) in record
            .drivers
            .iter()
            .filter(|(driver, _)| part.is_none_or(|of| of == *driver))
        {
            let now = (self.boot, part.current().unwrap().clone());
            let before = self
                .answered
                .insert((record.id.uid.clone(), driver.clone()), now.clone());
            let same = before.is_none_or(|before| before.0 != self.boot || before == now);
            assert!(same, "the same answer again");
        }
    }

    /// Asserts the invariants that hold while nothing is running.
    pub(super) fn assert_sound(&mut self) {
        // What is unprepared and prepared again may be answered otherwise.
        let stands = |uid: &Uid, driver: &DriverName| {
            let claim = self.durable.claims.get(uid);
            claim.is_some_and(|claim| {
                claim.drivers.contains_key(driver) && !claim.is_part_leaving(driver)
            })
        };
        self.answered.retain(|(uid, driver), _| stands(uid, driver));
        self.assert_drivers_are_known();
        assert_devices_are_exclusive(self.durable.claims.values().map(Arc::as_ref));
        let claims: BTreeMap<_, _> = self
            .table
            .claims()
            .map(|c| (c.id.uid.clone(), c.clone()))
            .collect();
        assert_eq!(
            claims, self.durable.claims,
            "the table says what is durable"
        );
        let pods: BTreeMap<_, _> = self
            .table
            .pods()
            .map(|p| (p.pod.uid.clone(), p.clone()))
            .collect();
        assert_eq!(pods, self.durable.pods, "the table says what is durable");
        for claim in claims.values() {
            assert!(claim.timeline.len() <= limit::TIMELINE_MAX);
            assert_used(claim);
            let holds: BTreeSet<_> = claim.holds.iter().map(|hold| &hold.key).collect();
            assert_eq!(
                holds.len(),
                claim.holds.len(),
                "each hold once: {:?}",
                claim.holds
            );
            let named = self.table.claim_named(&claim.id.namespace, &claim.id.name);
            assert_eq!(named, Some(claim), "one claim of a name at a time");
        }
    }

    /// No driver has a claim that no durable record has, be it one of a release that the driver did not take part in.
    fn assert_drivers_are_known(&self) {
        for (name, driver) in &self.drivers {
            for uid in driver.holds.iter().chain(&driver.called) {
                let claim = self
                    .durable
                    .claims
                    .get(uid)
                    .is_some_and(|r| r.drivers.contains_key(name));
                assert!(
                    claim || self.is_untold(name, uid),
                    "{name} has {uid}, which no record knows"
                );
            }
        }
    }

    /// Returns whether the claim was released by force, and it is durable that the driver did not unprepare it.
    fn is_untold(&self, driver: &DriverName, uid: &Uid) -> bool {
        self.durable
            .released
            .get(uid)
            .is_some_and(|released| released.untold.contains_key(driver))
    }

    pub(super) fn assert_empty(&self) {
        assert!(
            self.durable.claims.is_empty() && self.durable.pods.is_empty(),
            "nothing is left in the checkpoint"
        );
        for (name, driver) in &self.drivers {
            let mut left = driver.holds.iter().chain(&driver.called);
            assert!(
                left.all(|uid| self.is_untold(name, uid)),
                "{name} was called for everything: {driver:?}"
            );
        }
    }
}

/// Every part of a claim has a user, or is being unprepared.
fn assert_used(claim: &ClaimRecord) {
    let (uid, by_pods) = (&claim.id.uid, !claim.pods.is_empty());
    if claim.state == ClaimState::Unpreparing {
        assert!(
            !claim.is_held_by_kubelet(),
            "{uid} leaves though a kubelet uses it"
        );
        return;
    }
    assert!(by_pods || claim.is_held_by_kubelet(), "a user of {uid}");
    assert!(
        !claim.is_held_by_kubelet() || claim.kubelet.is_some(),
        "{uid}: since when, and for whom"
    );
    for (driver, part) in &claim.drivers {
        assert!(
            !(part.leaving && (by_pods || part.kubelet)),
            "{driver} of {uid} leaves and is used"
        );
        assert!(
            by_pods || part.kubelet || part.leaving,
            "a user of {driver} of {uid}"
        );
    }
    let open = claim
        .drivers
        .values()
        .any(|part| !part.leaving && part.current().is_none());
    assert_eq!(
        claim.state == ClaimState::Prepared,
        !open,
        "the state of {uid} is that of its parts"
    );
    for device in claim.allocation.devices.iter().filter(|_| by_pods) {
        assert!(
            claim.drivers.contains_key(&device.driver),
            "a pod uses all of {uid}"
        );
    }
}
