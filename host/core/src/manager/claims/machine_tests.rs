//! The decisions one by one; `properties` tries histories of them, and `table` what they stand on.

mod kubelet;
mod node;
mod properties;
mod retries;
mod table;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::fixtures::{allocation, claim, device, driver, permanent, pod, prepared, transient, uid};
use super::machine::*;
use super::table::ClaimTable;
use nodedock_model::{
    Again, Claim, ClaimRecord, ClaimState, Consumer, Device, DeviceName, DriverName, Hold, Inventory,
    ObjectRef, Pool, PoolName, PreparedClaim, Problem, limit,
};

const BOOT: &str = "boot-1";

/// What a pod's request for a claim comes to.
fn ask(table: &ClaimTable, claim: &Claim, pod: &ObjectRef, boot_id: &str) -> PrepareStep {
    ask_with_moved(table, claim, pod, boot_id, &[])
}

/// The same where nodes of drivers are no longer what they were.
fn ask_with_moved(
    table: &ClaimTable,
    claim: &Claim,
    pod: &ObjectRef,
    boot_id: &str,
    moved: &[DriverName],
) -> PrepareStep {
    let allocation = claim.allocation.as_ref().unwrap();
    let (holder, facts) = (Holder::Pod(pod), &|_: &DriverName, _: &str, _: &str| DeviceFacts::default());
    let request =
        PrepareRequest { claim, allocation, holder, facts, moved, boot_id, now_ms: 1, cause: "prepare" };
    prepare(table, &request)
}

#[track_caller]
fn called(step: PrepareStep) -> (Arc<ClaimRecord>, Vec<DriverName>) {
    match step {
        PrepareStep::Call { record, drivers } => (record, drivers),
        other => panic!("drivers were to be called: {other:?}"),
    }
}

#[track_caller]
fn waits(step: PrepareStep) -> Problem {
    match step {
        PrepareStep::Wait(problem) => problem,
        other => panic!("it was to wait: {other:?}"),
    }
}

/// What a claim holds; an identity is held for the gpu.
fn hold(key: &str, shared: bool) -> Hold {
    let of = Some(driver("gpu")).filter(|gpu| !key.starts_with(gpu.as_str()));
    Hold { key: key.to_owned(), shared, driver: of }
}

fn result(driver: &DriverName, outcome: Result<PreparedClaim, Problem>) -> DriverResult {
    DriverResult { driver: driver.clone(), by: None, outcome, duration_us: 7 }
}

fn done(record: &ClaimRecord, name: &DriverName) -> DriverResult {
    result(name, Ok(prepared(&record.driver_claim(name).devices, "memo")))
}

/// A claim that is prepared for a pod, in a table.
fn prepared_for(claim: &Claim, pod: &ObjectRef) -> (ClaimTable, Arc<ClaimRecord>) {
    let mut table = ClaimTable::default();
    let (record, drivers) = called(ask(&table, claim, pod, BOOT));
    let results = drivers.iter().map(|name| done(&record, name)).collect();
    let PrepareEnd::Prepared(record) = finish_prepare(&record, results, 2) else {
        panic!("all drivers answered")
    };
    table.put(record.clone());
    (table, record)
}

/// A claim that is being unprepared, in a table.
fn unpreparing(claim: &Claim, pod: &ObjectRef) -> ClaimTable {
    let (mut table, record) = prepared_for(claim, pod);
    table.put(roll_back(&record, 3).0);
    table
}

#[test]
fn admission_says_what_is_wrong_with_a_claim() {
    let (a, b) = (pod("a"), pod("b"));
    let good = claim("one", &["gpu/0"], &[&a]);
    let with = |change: fn(&mut Claim)| {
        let mut claim = good.clone();
        change(&mut claim);
        claim
    };
    let cases = [
        ("claim-of-another-pod", with(|c| c.owner_pod = Some(uid("uid-b")))),
        ("claim-not-allocated", with(|c| c.allocation = None)),
        ("claim-not-reserved", with(|c| c.reserved_for = vec![Consumer::of_pod(&pod("b"))])),
        ("claim-not-reserved", with(|c| (c.reserved_for, c.allocation) = (vec![], Some(allocation(&[]))))),
        ("claim-not-reserved", claim("some", &["!gpu/0", "gpu/1"], &[&b])),
        (
            "claim-on-another-node",
            with(|c| c.allocation.as_mut().unwrap().node_name = Some("node-2".to_owned())),
        ),
    ];
    for (code, claim) in cases {
        let problem = admit(&claim, &a, "node-1").unwrap_err();
        assert_eq!(problem.code, code, "{problem}");
        assert!(problem.message.contains(&claim.id.to_string()), "{problem}");
    }
    for claim in [good.clone(), with(|c| c.owner_pod = Some(uid("uid-a"))), claim("all", &["!gpu/0"], &[])] {
        assert!(admit(&claim, &a, "node-1").is_ok());
    }
    assert!(!admit(&with(|c| c.allocation = None), &a, "node-1").unwrap_err().kind.is_permanent());
}

#[test]
fn a_claim_holds_its_devices_and_their_identities() {
    let facts = |_: &DriverName, _: &str, device: &str| DeviceFacts {
        allow_multiple_allocations: device == "many",
        identity: if device == "0" { vec!["pci:1".to_owned()] } else { Vec::new() },
    };
    type Case = (&'static [&'static str], &'static [(&'static str, bool)]);
    let cases: [Case; 5] = [
        (&["gpu/0"], &[("gpu.example.com/pool/0", false), ("pci:1", false)]),
        (&["gpu/1#a"], &[("gpu.example.com/pool/1", true)]),
        (&["gpu/many"], &[("gpu.example.com/pool/many", true)]),
        (&["!gpu/0"], &[]),
        (&["gpu/1#a", "gpu/1"], &[("gpu.example.com/pool/1", false)]),
    ];
    for (devices, wanted) in cases {
        let wanted: Vec<_> = wanted.iter().map(|(key, shared)| hold(key, *shared)).collect();
        assert_eq!(holds(&allocation(devices), facts), wanted, "{devices:?}");
    }
}

#[test]
fn a_new_claim_is_an_intent_and_a_call_of_each_driver_once() {
    let (a, table) = (pod("a"), ClaimTable::default());
    let wanted = claim("one", &["gpu/0", "gpu/1", "nic/0"], &[&a]);
    let (record, drivers) = called(ask(&table, &wanted, &a, BOOT));
    assert_eq!((&record.id, Some(&record.allocation)), (&wanted.id, wanted.allocation.as_ref()));
    assert_eq!(drivers, [driver("gpu"), driver("nic")]);
    assert_eq!((record.state, record.boot_id.as_str()), (ClaimState::Preparing, BOOT));
    assert_eq!(record.pods.keys().collect::<Vec<_>>(), [&a.uid]);
    assert_eq!(record.holds.len(), 3);
}

#[test]
fn a_claim_without_devices_is_prepared_without_a_driver() {
    let a = pod("a");
    let (_, record) = prepared_for(&claim("none", &[], &[&a]), &a);
    assert_eq!(record.state, ClaimState::Prepared);
}

#[test]
fn another_pod_joins_a_prepared_claim_without_a_call_and_the_same_pod_changes_nothing() {
    let (a, b) = (pod("a"), pod("b"));
    let wanted = claim("one", &["gpu/0"], &[&a, &b]);
    let (table, record) = prepared_for(&wanted, &a);
    assert_eq!(ask(&table, &wanted, &a, BOOT), PrepareStep::Known { record, changed: false });
    let PrepareStep::Known { record, changed: true } = ask(&table, &wanted, &b, BOOT) else {
        panic!("b joins")
    };
    assert_eq!(record.pods.keys().collect::<Vec<_>>(), [&a.uid, &b.uid]);
    assert_eq!(record.state, ClaimState::Prepared);
}

#[test]
fn a_new_boot_calls_every_driver_again_and_keeps_their_memos() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a]);
    let (table, _) = prepared_for(&wanted, &a);
    let (record, drivers) = called(ask(&table, &wanted, &a, "boot-2"));
    assert_eq!(drivers.len(), 2);
    let results = vec![done(&record, &driver("gpu")), result(&driver("nic"), Err(permanent()))];
    let PrepareEnd::Open(record, _) = finish_prepare(&record, results, 3) else {
        panic!("the nic may be in place")
    };
    let boot_of = |name| record.live_claim(&driver(name)).map(|live| (live.memo, live.boot_id)).unwrap();
    assert_eq!(boot_of("gpu"), (b"memo".to_vec(), "boot-2".to_owned()));
    assert_eq!(boot_of("nic"), (b"memo".to_vec(), BOOT.to_owned()));
}

#[test]
fn a_claim_that_was_prepared_before_a_reboot_is_kept_when_its_driver_refuses_it() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0"], &[&a]);
    let (table, _) = prepared_for(&wanted, &a);
    let (record, _) = called(ask(&table, &wanted, &a, "boot-2"));
    let end = finish_prepare(&record, vec![result(&driver("gpu"), Err(permanent()))], 3);
    assert!(matches!(end, PrepareEnd::Open(..)), "it is its pod's to unprepare: {end:?}");
}

/// A memo of two boots ago was said to be of the last: the second reboot overwrote where it came from.
#[test]
fn a_memo_keeps_its_boot_over_a_second_boot() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0"], &[&a]);
    let (mut table, _) = prepared_for(&wanted, &a);
    for boot in ["boot-2", "boot-3"] {
        let (record, _) = called(ask(&table, &wanted, &a, boot));
        table.put(record);
    }
    assert_eq!(table.claim("uid-one").unwrap().live_claim(&driver("gpu")).unwrap().boot_id, BOOT);
}

#[test]
fn what_is_in_the_way_is_named() {
    let (a, b) = (pod("a"), pod("b"));
    let one = claim("one", &["gpu/0"], &[&a]);
    let (table, _) = prepared_for(&one, &a);
    let held = waits(ask(&table, &claim("two", &["nic/0", "gpu/0"], &[&b]), &b, BOOT));
    assert_eq!(held.code, "device-held");
    for part in ["default/two", "gpu.example.com/pool/0", "default/one", "default/a"] {
        assert!(held.message.contains(part), "{held}");
    }
    let replaced = waits(ask(&table, &claim("one@uid-new", &["gpu/1"], &[&b]), &b, BOOT));
    assert_eq!(replaced.code, "claim-replaced");
    assert!(replaced.message.contains("uid-one") && replaced.message.contains("uid-new"), "{replaced}");
    assert_eq!(waits(ask(&unpreparing(&one, &a), &one, &b, BOOT)).code, "claim-unpreparing");
}

#[test]
fn a_problem_names_few_of_many_pods() {
    let pods: Vec<_> = (0..200).map(|n| pod(&format!("pod-{n:03}"))).collect();
    let shared = claim("shared", &["gpu/0"], &pods.iter().collect::<Vec<_>>());
    let (mut table, _) = prepared_for(&shared, &pods[0]);
    for pod in &pods[1..] {
        let PrepareStep::Known { record, .. } = ask(&table, &shared, pod, BOOT) else { panic!("it joins") };
        table.put(record);
    }
    let held = waits(ask(&table, &claim("two", &["gpu/0"], &[]), &pod("b"), BOOT));
    assert!(held.message.contains("pod-002, and 197 more"), "{held}");
    assert!(held.message.len() < limit::PROBLEM_MESSAGE_BYTES_MAX);
}

#[test]
fn shares_and_admin_access_are_not_in_the_way() {
    let (a, b) = (pod("a"), pod("b"));
    let (table, _) = prepared_for(&claim("one", &["gpu/0#a"], &[&a]), &a);
    for (devices, free) in [("gpu/0#b", true), ("!gpu/0", true), ("gpu/0", false), ("gpu/1", true)] {
        let step = ask(&table, &claim("two", &[devices], &[&b]), &b, BOOT);
        assert_eq!(matches!(step, PrepareStep::Call { .. }), free, "{devices}: {step:?}");
    }
}

#[test]
fn another_allocation_of_a_known_claim_is_refused() {
    let a = pod("a");
    let (table, _) = prepared_for(&claim("one", &["gpu/0"], &[&a]), &a);
    let PrepareStep::Refuse(problem) = ask(&table, &claim("one", &["gpu/1"], &[&a]), &a, BOOT) else {
        panic!("an allocation is final")
    };
    assert_eq!(problem.code, "allocation-changed");
}

/// A claim lost what it shared while its driver was away: the retry for another driver made its device exclusive, and it was
/// refused for a sharer that was there all the time.
#[test]
fn what_a_claim_holds_does_not_change_while_a_driver_is_away() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a]);
    let (mut table, allocation) = (ClaimTable::default(), wanted.allocation.as_ref().unwrap());
    fn shared(_: &DriverName, _: &str, _: &str) -> DeviceFacts {
        DeviceFacts { allow_multiple_allocations: true, ..DeviceFacts::default() }
    }
    fn unknown(_: &DriverName, _: &str, _: &str) -> DeviceFacts {
        DeviceFacts::default()
    }
    let request = |facts| PrepareRequest {
        claim: &wanted,
        allocation,
        holder: Holder::Pod(&a),
        facts,
        moved: &[],
        boot_id: BOOT,
        now_ms: 1,
        cause: "prepare",
    };
    table.put(called(prepare(&table, &request(&shared))).0);
    let (record, _) = called(prepare(&table, &request(&unknown)));
    assert_eq!(record.holds, holds(allocation, shared));
    assert!(record.holds.iter().all(|hold| hold.shared), "{:?}", record.holds);
}

/// A device that was plugged in again has other numbers: what the claim's driver said of it before is void.
#[test]
fn a_claim_whose_device_nodes_moved_is_prepared_again_by_their_driver() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a]);
    let (mut table, before) = prepared_for(&wanted, &a);
    let (record, drivers) = called(ask_with_moved(&table, &wanted, &a, BOOT, &[driver("gpu")]));
    assert_eq!((drivers, record.state), (vec![driver("gpu")], ClaimState::Preparing));
    assert!(record.drivers[&driver("gpu")].current().is_none());
    assert_eq!(record.drivers[&driver("nic")], before.drivers[&driver("nic")]);
    let memo = &record.live_claim(&driver("gpu")).unwrap().memo;
    assert_eq!(memo.as_slice(), b"memo", "it is still good for an unprepare");
    let refused = finish_prepare(&record, vec![result(&driver("gpu"), Err(permanent()))], 3);
    let PrepareEnd::Open(record, _) = refused else { panic!("the nic stands: {refused:?}") };
    table.put(record);
    let (record, drivers) = called(ask(&table, &wanted, &a, BOOT));
    assert_eq!(drivers, [driver("gpu")], "it stays void until the driver prepares it");
    let end = finish_prepare(&record, vec![done(&record, &driver("gpu"))], 4);
    assert!(matches!(end, PrepareEnd::Prepared(record) if !record.drivers[&driver("gpu")].stale));
}

#[test]
fn missing_files_of_a_plugin_are_noted_once_until_they_are_there() {
    let a = pod("a");
    let (_, record) = prepared_for(&claim("one", &["gpu/0"], &[&a]), &a);
    assert_eq!(note_files(&record, None, 5), None, "nothing was missing");
    let noted = note_files(&record, Some(transient()), 5).unwrap();
    assert_eq!(noted.timeline.back().unwrap().problem, Some(transient()));
    assert_eq!(note_files(&noted, Some(transient()), 6), None);
    assert!(note_files(&noted, Some(permanent()), 6).is_some(), "other files are missing");
    let there = note_files(&noted, None, 7).unwrap();
    assert_eq!(there.timeline.back().unwrap().problem, None);
    assert_eq!(note_files(&there, None, 8), None);
}

/// A claim that a driver would not unprepare for a day had a history of nothing else.
#[test]
fn repeated_tries_of_an_unprepare_are_one_entry_for_each_driver() {
    let a = pod("a");
    let table = unpreparing(&claim("one", &["gpu/0", "nic/0"], &[&a]), &a);
    let mut record = table.claim("uid-one").unwrap().clone();
    let before = record.timeline.len();
    let mut attempt = |now_ms, gpu: Problem, nic: Problem| {
        let results = vec![(driver("gpu"), Err(gpu), now_ms), (driver("nic"), Err(nic), 0)];
        let UnprepareEnd::Kept(kept, _) = finish_unprepare(&record, results, now_ms) else {
            panic!("it is not unprepared")
        };
        record = kept;
        let entries = record.timeline.iter().skip(before);
        entries.map(|entry| (entry.cause.clone(), entry.at_ms, entry.again)).collect::<Vec<_>>()
    };
    let other = |words: &str| Problem { message: words.to_owned(), ..transient() };
    attempt(10, transient(), transient());
    for now_ms in 11..100 {
        attempt(now_ms, other("still"), transient());
    }
    let again = |count, last_at_ms| Some(Again { count, last_at_ms });
    let (gpu, nic) = (driver("gpu").to_string(), driver("nic").to_string());
    let told = attempt(100, other("at last"), permanent());
    let expected = [(gpu, 10, again(91, 100)), (nic.clone(), 10, again(90, 99)), (nic.clone(), 100, None)];
    assert_eq!(told, expected, "another problem is another entry");
    let told = attempt(101, transient(), transient());
    assert_eq!(told.last(), Some(&(nic, 101, None)), "and what came before it is not counted on");
    let last = record.timeline.iter().find(|entry| entry.again.is_some()).unwrap();
    assert_eq!((last.problem.as_ref(), last.duration_us), (Some(&transient()), 101), "those of the last");
    let json = serde_json::to_value(&record.timeline[0]).unwrap();
    assert_eq!(json.get("again"), None, "what happened once is written as before");
}

#[test]
fn a_retry_calls_only_what_is_missing() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a]);
    let mut table = ClaimTable::default();
    let (record, _) = called(ask(&table, &wanted, &a, BOOT));
    let results = vec![done(&record, &driver("gpu")), result(&driver("nic"), Err(transient()))];
    let PrepareEnd::Open(record, problem) = finish_prepare(&record, results, 2) else {
        panic!("the nic is missing")
    };
    assert_eq!(problem, transient());
    table.put(record);
    let (record, drivers) = called(ask(&table, &wanted, &a, BOOT));
    assert_eq!(drivers, [driver("nic")]);
    let end = finish_prepare(&record, vec![done(&record, &driver("nic"))], 3);
    assert!(matches!(end, PrepareEnd::Prepared(_)), "{end:?}");
}

#[test]
fn a_claim_is_rolled_back_only_if_nothing_can_have_been_done() {
    let (a, b) = (pod("a"), pod("b"));
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a, &b]);
    let (record, _) = called(ask(&ClaimTable::default(), &wanted, &a, BOOT));
    let two = |gpu, nic| vec![result(&driver("gpu"), gpu), result(&driver("nic"), nic)];
    let ok = || Ok(PreparedClaim::default());
    let cases = [
        ("rolled back", two(Err(permanent()), Err(permanent()))),
        ("open", two(Err(permanent()), Err(transient()))),
        ("open", two(Err(permanent()), ok())),
        ("open", vec![result(&driver("gpu"), Err(permanent()))]),
        ("prepared", two(ok(), ok())),
    ];
    for (wanted, results) in cases {
        let end = match finish_prepare(&record, results.clone(), 2) {
            PrepareEnd::Prepared(_) => "prepared",
            PrepareEnd::Open(_, problem) => {
                assert_eq!(problem, permanent(), "what does not pass is said first");
                "open"
            }
            PrepareEnd::RolledBack(..) => "rolled back",
        };
        assert_eq!(end, wanted, "{results:?}");
    }
    let mut shared = ClaimRecord::clone(&record);
    shared.pods.insert(b.uid.clone(), b);
    let end = finish_prepare(&shared, two(Err(permanent()), Err(permanent())), 2);
    assert!(matches!(end, PrepareEnd::Open(..)), "each pod leaves by itself: {end:?}");
}

#[test]
fn an_unprepare_is_for_the_last_pod_that_holds_the_claim() {
    let (a, b) = (pod("a"), pod("b"));
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a, &b]);
    let (mut table, _) = prepared_for(&wanted, &a);
    let PrepareStep::Known { record, .. } = ask(&table, &wanted, &b, BOOT) else { panic!("b joins") };
    table.put(record);
    let step = |table: &ClaimTable, pod: Option<&ObjectRef>| {
        unprepare(table, &wanted.id.uid, pod.map(|pod| &pod.uid), 5, "unprepare")
    };
    assert_eq!(step(&table, Some(&pod("c"))), UnprepareStep::Nothing);
    assert_eq!(step(&table, None), UnprepareStep::Nothing, "no unprepare was begun");
    assert_eq!(unprepare(&table, &uid("none"), Some(&a.uid), 5, "unprepare"), UnprepareStep::Nothing);
    let UnprepareStep::Left(record) = step(&table, Some(&a)) else { panic!("b holds it still") };
    assert_eq!(record.pods.keys().collect::<Vec<_>>(), [&b.uid]);
    table.put(record);
    let UnprepareStep::Call { record, drivers } = step(&table, Some(&b)) else { panic!("b was the last") };
    assert_eq!((record.state, drivers.len()), (ClaimState::Unpreparing, 2));
    assert!(record.pods.contains_key(&b.uid), "until it is done, b can ask again");
    table.put(record.clone());
    let again = step(&table, None);
    assert_eq!(again, UnprepareStep::Call { record, drivers });
}

#[test]
fn an_unprepare_goes_on_with_the_drivers_that_did_not_unprepare() {
    let a = pod("a");
    let (table, _) = prepared_for(&claim("one", &["gpu/0", "nic/0"], &[&a]), &a);
    let UnprepareStep::Call { record, .. } = unprepare(&table, &uid("uid-one"), Some(&a.uid), 5, "unprepare")
    else {
        panic!("a is the last")
    };
    let results = vec![(driver("gpu"), Ok(()), 1), (driver("nic"), Err(transient()), 1)];
    let UnprepareEnd::Kept(record, problem) = finish_unprepare(&record, results, 6) else {
        panic!("nic is left")
    };
    assert_eq!(problem, transient());
    assert_eq!(record.drivers.keys().collect::<Vec<_>>(), [&driver("nic")]);
    assert_eq!(record.live_claim(&driver("nic")).unwrap().memo, b"memo");
    assert_eq!(finish_unprepare(&record, vec![(driver("nic"), Ok(()), 1)], 7), UnprepareEnd::Gone);
    assert!(
        matches!(finish_unprepare(&record, vec![], 7), UnprepareEnd::Kept(..)),
        "no answer is no success"
    );
}

#[test]
fn a_driver_is_not_called_for_devices_that_it_does_not_have() {
    let names = |pool: &str, device: &str| (PoolName::new(pool).unwrap(), DeviceName::new(device).unwrap());
    let (pool, here) = names("pool", "0");
    let devices = BTreeMap::from([(here, Device::default())]);
    let inventory = Inventory { pools: BTreeMap::from([(pool, Pool { devices, ..Pool::default() })]) };
    let check = |allocation| check_devices(&allocation, &driver("gpu"), &inventory).map_err(|p| p.code);
    assert_eq!(check(allocation(&["gpu/0", "nic/7"])), Ok(()));
    assert_eq!(check(allocation(&["gpu/0", "gpu/1"])), Err("no-such-device".to_owned()));
    let mut elsewhere = allocation(&["gpu/0"]);
    elsewhere.devices.push(device("gpu/0"));
    elsewhere.devices[1].pool = PoolName::new("other").unwrap();
    assert_eq!(check(elsewhere), Err("no-such-pool".to_owned()));
}

#[test]
fn a_claims_history_is_bounded_and_the_newest_stays() {
    let (a, b) = (pod("a"), pod("b"));
    let wanted = claim("one", &["gpu/0"], &[&a, &b]);
    let (mut table, _) = prepared_for(&wanted, &a);
    for _ in 0..limit::TIMELINE_MAX {
        let PrepareStep::Known { record, .. } = ask(&table, &wanted, &b, BOOT) else { panic!("b joins") };
        table.put(record);
        let UnprepareStep::Left(record) = unprepare(&table, &wanted.id.uid, Some(&b.uid), 9, "unprepare")
        else {
            panic!("b leaves")
        };
        table.put(record);
    }
    let timeline = &table.claim("uid-one").unwrap().timeline;
    assert_eq!(timeline.len(), limit::TIMELINE_MAX);
    assert_eq!(timeline.back().map(|last| last.what.as_str()), Some("left"));
}
