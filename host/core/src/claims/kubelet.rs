//! What a kubelet asks for: each driver's part of a claim by itself, and in its own time. The rest of the way is that of pods.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::machine;
use super::prepare::Asker;
use super::source::check_bounds;
use super::unprepare::Leaver;
use super::{Claims, Inner, interrupted};
use crate::cdi;
use crate::driver::Call;
use nodedock_model::{
    Claim, ClaimRecord, ClaimStatuses, DriverName, KubeletClaim, KubeletDevice, ObjectRef,
    PreparedForKubelet, Problem, ReportedDevice, Uid, limit,
};

/// Where the claim of a prepare comes from.
enum Asked {
    Source(ObjectRef),
    /// It came with the request, and is no object of the API server.
    Given(Claim),
}

impl Asked {
    fn uid(&self) -> &Uid {
        match self {
            Self::Source(id) => &id.uid,
            Self::Given(claim) => &claim.id.uid,
        }
    }
}

impl Claims {
    /// Makes one driver's part of a claim ready for a kubelet. No devices, where the claim has none of the driver. Goes on when the
    /// caller goes away.
    pub async fn prepare_for_kubelet(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<Vec<KubeletDevice>, Problem> {
        let prepared = self.prepare_part(driver, Asked::Source(claim.clone()), request_id).await;
        prepared.map(|prepared| prepared.devices)
    }

    /// The same of a claim that no API server knows, such as one that stands for devices that a kubelet takes through a device plugin.
    /// `held_for_kubelet` leaves it out; `given_to_kubelet` lists it.
    pub async fn prepare_given_for_kubelet(
        &self,
        driver: &DriverName,
        claim: Claim,
        request_id: Arc<str>,
    ) -> Result<PreparedForKubelet, Problem> {
        self.prepare_part(driver, Asked::Given(claim), request_id).await
    }

    async fn prepare_part(
        &self,
        driver: &DriverName,
        asked: Asked,
        request_id: Arc<str>,
    ) -> Result<PreparedForKubelet, Problem> {
        let (inner, driver) = (self.0.clone(), driver.clone());
        let work = async move {
            let started = Instant::now();
            let outcome = inner.prepare_for_kubelet(&driver, asked, request_id).await;
            inner.metrics.prepared(started.elapsed(), outcome.is_err());
            outcome
        };
        self.0.tasks.complete("kubelet", work).await.unwrap_or_else(|| Err(interrupted()))
    }

    /// Gives up one driver's part of a claim, by the claim's UID and from the checkpoint alone; what is unknown is done. A driver that
    /// does not give it up is asked again, by this and without it. Goes on when the caller goes away.
    pub async fn unprepare_for_kubelet(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<(), Problem> {
        let (inner, driver, uid) = (self.0.clone(), driver.clone(), claim.uid.clone());
        let work = async move {
            let started = Instant::now();
            let outcome = inner.unprepare_for_kubelet(&driver, &uid, request_id).await;
            inner.metrics.unprepared(started.elapsed(), outcome.is_err());
            outcome
        };
        self.0.tasks.complete("kubelet", work).await.unwrap_or_else(|| Err(interrupted()))
    }

    /// Gives up every part of a claim that a kubelet holds, because it will not ask: the claim's object or its pods are gone. `why` goes
    /// into the claim's history. A problem: some driver did not give it up, and is asked again. Goes on when the caller goes away.
    pub async fn give_up_for_kubelet(&self, claim: &Uid, why: &str) -> Result<(), Problem> {
        let (inner, claim, why) = (self.0.clone(), claim.clone(), why.to_owned());
        let work = async move { inner.give_up_for_kubelet(&claim, &why).await };
        self.0.tasks.complete("kubelet", work).await.unwrap_or_else(|| Err(interrupted()))
    }

    /// Claims of the API server of which a kubelet holds parts, by UID.
    pub fn held_for_kubelet(&self) -> Vec<KubeletClaim> {
        self.kubelet_claims(false)
    }

    /// Claims that came with a kubelet's request, and that it holds, by UID.
    pub fn given_to_kubelet(&self) -> Vec<KubeletClaim> {
        self.kubelet_claims(true)
    }

    fn kubelet_claims(&self, given: bool) -> Vec<KubeletClaim> {
        let table = self.0.table.lock();
        table
            .claims()
            .filter_map(|record| held(record))
            .filter(|(of, _)| *of == given)
            .map(|(_, c)| c)
            .collect()
    }

    /// What drivers tell of the devices of claims that a kubelet holds, by UID; claims of which nothing is told are left out.
    pub fn device_statuses(&self) -> Vec<ClaimStatuses> {
        let table = self.0.table.lock();
        table.claims().filter_map(|record| statuses(record)).collect()
    }

    /// The same of one claim.
    pub fn device_statuses_of(&self, claim: &Uid) -> Option<ClaimStatuses> {
        statuses(self.0.table.lock().claim(claim.as_str())?)
    }

    /// Changes whenever `device_statuses` may have changed: a claim with something to tell was committed, or is gone.
    pub fn device_status_changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.0.statuses.subscribe()
    }
}

impl Inner {
    async fn prepare_for_kubelet(
        &self,
        driver: &DriverName,
        asked: Asked,
        request_id: Arc<str>,
    ) -> Result<PreparedForKubelet, Problem> {
        // Also while it waits: an unprepare that comes meanwhile has to find what this will have taken.
        let _part = self.kubelet_locks.take([(asked.uid().clone(), driver.clone())]).await;
        let given = matches!(asked, Asked::Given(_));
        let claim = match asked {
            Asked::Source(id) => self.claim_for_kubelet(driver, &id).await?,
            Asked::Given(claim) => claim,
        };
        check_bounds(&claim)?;
        let allocation = machine::admit_for_kubelet(&claim, &self.settings.node.name)?;
        if !allocation.devices.iter().any(|device| device.driver == *driver) {
            return Ok(PreparedForKubelet::default());
        }
        let call = Call { request_id, deadline: self.settings.call_deadline };
        let asker = Asker::Kubelet { driver, given };
        let uid = claim.id.uid.clone();
        let (held, plan) = self.plan(asker, &BTreeMap::from([(uid.clone(), claim)])).await;
        let end = self.carry_out(asker, plan, &call).await.remove(&uid);
        end.unwrap_or_else(|| Err(interrupted()))?;
        let record = self.table.lock().claim(uid.as_str()).cloned();
        drop(held);
        record.and_then(|record| answer(&record, driver)).ok_or_else(interrupted)
    }

    /// The claim as its source has it, or as it is known here where the source cannot be asked.
    async fn claim_for_kubelet(&self, driver: &DriverName, asked: &ObjectRef) -> Result<Claim, Problem> {
        let reading = self.source.claim_with_uid(&asked.namespace, &asked.name, &asked.uid);
        let read = tokio::time::timeout(limit::CLAIM_SOURCE_WAIT, reading).await;
        let problem = match read.unwrap_or_else(|_| Err(source_slow(asked))) {
            Ok(Some(claim)) if claim.id.uid == asked.uid => return Ok(claim),
            Ok(Some(claim)) => return Err(replaced(asked, &claim.id.uid)),
            Ok(None) => return Err(no_claim(asked)),
            Err(problem) => problem,
        };
        let known = self.table.lock().claim(asked.uid.as_str()).cloned();
        // One that was rebuilt from CDI files tells of some drivers' devices only: that it has none of this one's is not known.
        let tells = |record: &Arc<ClaimRecord>| {
            record.allocation.devices.iter().any(|device| device.driver == *driver)
        };
        let known = known.filter(tells);
        let claim = machine::known_claim(known.as_deref(), asked, problem.clone())?;
        tracing::warn!(claim = %asked, %problem, "a claim that cannot be read is taken as it is known here");
        Ok(claim)
    }

    async fn unprepare_for_kubelet(
        &self,
        driver: &DriverName,
        uid: &Uid,
        request_id: Arc<str>,
    ) -> Result<(), Problem> {
        let _part = self.kubelet_locks.take([(uid.clone(), driver.clone())]).await;
        let leaver = Leaver::Kubelet { driver: Some(driver), cause: "unprepare kubelet" };
        let end = self.leave_to(uid, leaver, request_id).await;
        // Whoever asks next asks anew.
        self.refusals().taken(uid, driver);
        end
    }

    async fn give_up_for_kubelet(&self, uid: &Uid, why: &str) -> Result<(), Problem> {
        let drivers: Vec<_> = {
            let table = self.table.lock();
            let record = table.claim(uid.as_str());
            record.into_iter().flat_map(|record| record.drivers.keys().cloned()).collect()
        };
        let _parts =
            self.kubelet_locks.take(drivers.iter().map(|driver| (uid.clone(), driver.clone()))).await;
        let leaver = Leaver::Kubelet { driver: None, cause: why };
        let end = self.leave_to(uid, leaver, format!("give-up-{uid}").into()).await;
        drivers.iter().for_each(|driver| self.refusals().taken(uid, driver));
        end
    }

    async fn leave_to(&self, uid: &Uid, leaver: Leaver<'_>, request_id: Arc<str>) -> Result<(), Problem> {
        let call = Call { request_id, deadline: self.settings.call_deadline };
        let _claim = self.claim_locks.take([uid.clone()]).await;
        let end = self.give_up(std::slice::from_ref(uid), leaver, &call).await.remove(uid);
        end.map_or(Ok(()), |end| end.map(drop))
    }

    /// Whoever writes statuses looks again, if these records have something to tell.
    pub(super) fn tell_statuses<'a>(&self, mut records: impl Iterator<Item = &'a Arc<ClaimRecord>>) {
        if records.any(|record| record.kubelet.is_some() && has_status(record)) {
            self.statuses.send_modify(|count| *count += 1);
        }
    }
}

/// What a kubelet is told of a driver's part.
fn answer(record: &ClaimRecord, driver: &DriverName) -> Option<PreparedForKubelet> {
    let prepared = record.drivers.get(driver)?.current()?;
    let names = cdi::cdi_devices(record, driver).into_iter().map(|(_, names)| names);
    let devices = prepared.devices.iter().zip(names).map(|(device, cdi)| KubeletDevice {
        requests: device.requests.clone(),
        pool: device.pool.clone(),
        device: device.device.clone(),
        cdi,
        share_id: device.share_id.clone(),
    });
    Some(PreparedForKubelet { devices: devices.collect(), annotations: prepared.annotations.clone() })
}

/// What a kubelet holds of a claim, and whether the claim came with its request. None: nothing.
fn held(record: &ClaimRecord) -> Option<(bool, KubeletClaim)> {
    let drivers: Vec<_> = record.kubelet_drivers().cloned().collect();
    let hold = record.kubelet.as_ref().filter(|_| !drivers.is_empty())?;
    let (claim, consumers) = (record.id.clone(), hold.consumers.clone());
    Some((hold.given, KubeletClaim { claim, drivers, consumers, since_ms: hold.since_ms }))
}

fn has_status(record: &ClaimRecord) -> bool {
    let prepared = record.drivers.values().filter_map(|part| part.prepared.as_ref());
    prepared.flat_map(|prepared| &prepared.devices).any(|device| device.status.is_some())
}

fn statuses(record: &ClaimRecord) -> Option<ClaimStatuses> {
    let is_object = record.kubelet.as_ref().is_some_and(|hold| !hold.given);
    let held = record.drivers.iter().filter(|(_, part)| is_object && part.kubelet);
    let current = held.filter_map(|(driver, part)| Some((driver, part.current()?)));
    let reported = |(driver, prepared): (&DriverName, &nodedock_model::PreparedClaim)| {
        let reported = prepared.devices.iter().filter_map(|device| {
            Some(ReportedDevice {
                driver: driver.clone(),
                pool: device.pool.clone(),
                device: device.device.clone(),
                share_id: device.share_id.clone(),
                status: device.status.clone()?,
            })
        });
        reported.collect::<Vec<_>>()
    };
    let devices: Vec<_> = current.flat_map(reported).collect();
    (!devices.is_empty()).then(|| ClaimStatuses { claim: record.id.clone(), devices })
}

fn no_claim(asked: &ObjectRef) -> Problem {
    Problem::not_found("no-such-claim", format!("claim {asked} (UID {}) does not exist", asked.uid))
}

fn replaced(asked: &ObjectRef, now: &Uid) -> Problem {
    let message = format!("claim {asked} has UID {now}, and {} is wanted: it was replaced", asked.uid);
    Problem::conflict("claim-replaced", message)
}

fn source_slow(asked: &ObjectRef) -> Problem {
    let seconds = limit::CLAIM_SOURCE_WAIT.as_secs();
    Problem::unavailable("claim-not-read", format!("claim {asked} was not read within {seconds} s"))
}
