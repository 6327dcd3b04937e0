//! Decisions where a kubelet holds claims, one by one.

use super::*;
use nodedock_model::KubeletHold;

fn facts(_: &DriverName, _: &str, device: &str) -> DeviceFacts {
    DeviceFacts { allow_multiple_allocations: device == "many", ..DeviceFacts::default() }
}

/// What a kubelet's request for a driver's part comes to.
fn ask_part(table: &ClaimTable, claim: &Claim, short: &str, boot_id: &str) -> PrepareStep {
    let allocation = claim.allocation.as_ref().unwrap();
    let driver = driver(short);
    let holder = Holder::Kubelet { driver: &driver, given: false };
    let (facts, moved) = (&facts, &[]);
    let request =
        PrepareRequest { claim, allocation, holder, facts, moved, boot_id, now_ms: 9, cause: "prepare" };
    prepare(table, &request)
}

/// A table with parts of a claim prepared for a kubelet.
fn held(claim: &Claim, drivers: &[&str]) -> ClaimTable {
    let mut table = ClaimTable::default();
    for short in drivers {
        take_part(&mut table, claim, short);
    }
    table
}

fn take_part(table: &mut ClaimTable, claim: &Claim, short: &str) {
    let (record, drivers) = called(ask_part(table, claim, short, BOOT));
    assert_eq!(drivers, [driver(short)]);
    table.put(record.clone());
    let end = finish_prepare_part(&record, &driver(short), vec![done(&record, &driver(short))], 2);
    let PrepareEnd::Prepared(record) = end else { panic!("its driver answered: {end:?}") };
    table.put(record);
}

fn leave_part(table: &ClaimTable, claim: &Claim, short: &str) -> UnprepareStep {
    unprepare_by_kubelet(table, &claim.id.uid, Some(&driver(short)), 5, "kubelet")
}

#[track_caller]
fn told(step: UnprepareStep) -> (Arc<ClaimRecord>, Vec<DriverName>) {
    match step {
        UnprepareStep::Call { record, drivers } => (record, drivers),
        other => panic!("drivers were to be told: {other:?}"),
    }
}

#[test]
fn admission_without_a_pod_says_what_is_wrong_with_a_claim() {
    let a = pod("a");
    let good = claim("one", &["gpu/0"], &[&a]);
    let with = |change: fn(&mut Claim)| {
        let mut claim = good.clone();
        change(&mut claim);
        claim
    };
    let other = Consumer { api_group: "scheduling.k8s.io".to_owned(), ..Consumer::of_pod(&pod("b")) };
    let mut of_group = with(|c| c.owner_pod = Some(uid("uid-a")));
    of_group.reserved_for = vec![other];
    let cases = [
        (Some("claim-of-another-pod"), with(|c| c.owner_pod = Some(uid("uid-b")))),
        (Some("claim-not-allocated"), with(|c| c.allocation = None)),
        (
            Some("claim-on-another-node"),
            with(|c| c.allocation.as_mut().unwrap().node_name = Some("node-2".to_owned())),
        ),
        (None, good.clone()),
        (None, with(|c| c.owner_pod = Some(uid("uid-a")))),
        (None, with(|c| c.reserved_for.clear())),
        (None, of_group),
        (None, claim("all", &["!gpu/0"], &[])),
    ];
    for (code, claim) in cases {
        let refused = admit_for_kubelet(&claim, "node-1").err().map(|problem| problem.code);
        assert_eq!(refused.as_deref(), code, "{claim:?}");
    }
}

#[test]
fn a_claim_that_cannot_be_read_is_taken_as_it_is_known() {
    let wanted = claim("one", &["gpu/0"], &[&pod("a")]);
    let table = held(&wanted, &["gpu"]);
    let record = table.claim("uid-one").map(|record| ClaimRecord::clone(record)).unwrap();
    let leaving = ClaimRecord { state: ClaimState::Unpreparing, ..record.clone() };
    let other = claim("one@uid-newer", &[], &[]).id;
    let away = [transient(), Problem::internal("a", "html"), Problem::denied("b", "no token")];
    for problem in away {
        let known = known_claim(Some(&record), &wanted.id, problem.clone());
        assert_eq!(known, Ok(wanted.clone()));
        for (known, asked) in [(None, &wanted.id), (Some(&leaving), &wanted.id), (Some(&record), &other)] {
            assert_eq!(known_claim(known, asked, problem.clone()), Err(problem.clone()));
        }
    }
    for says in [Problem::not_found("a", "gone"), Problem::conflict("b", "replaced"), permanent()] {
        assert_eq!(known_claim(Some(&record), &wanted.id, says.clone()), Err(says));
    }
}

#[test]
fn a_kubelet_takes_a_claim_driver_by_driver_and_is_known_afterwards() {
    let wanted = claim("one", &["gpu/0", "nic/many"], &[&pod("a")]);
    let mut table = held(&wanted, &["gpu"]);
    let record = table.claim("uid-one").unwrap().clone();
    assert_eq!((record.state, record.drivers.len()), (ClaimState::Prepared, 1), "the nic was not requested");
    let hold = KubeletHold { since_ms: 9, consumers: wanted.reserved_for.clone(), given: false };
    assert_eq!(record.kubelet, Some(hold));
    let keys = |record: &ClaimRecord| record.holds.iter().map(|hold| hold.key.clone()).collect::<Vec<_>>();
    assert_eq!(keys(&record), ["gpu.example.com/pool/0"]);
    take_part(&mut table, &wanted, "nic");
    let record = table.claim("uid-one").unwrap().clone();
    assert_eq!(record.kubelet_drivers().count(), 2);
    assert_eq!(keys(&record), ["gpu.example.com/pool/0", "nic.example.com/pool/many"]);
    assert_eq!(record.holds.iter().map(|hold| hold.shared).collect::<Vec<_>>(), [false, true]);
    for short in ["gpu", "nic"] {
        let step = ask_part(&table, &wanted, short, BOOT);
        assert_eq!(step, PrepareStep::Known { record: record.clone(), changed: false });
    }
    let reserved = claim("one", &["gpu/0", "nic/many"], &[&pod("a"), &pod("b")]);
    let PrepareStep::Known { record: more, changed: true } = ask_part(&table, &reserved, "gpu", BOOT) else {
        panic!("another pod is new")
    };
    assert_eq!(more.kubelet.as_ref().unwrap().consumers.len(), 2);
    assert_eq!(more.timeline, record.timeline, "which is no event");
}

#[test]
fn the_failure_of_another_driver_does_not_matter_to_this_one() {
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&pod("a")]);
    let mut table = held(&wanted, &[]);
    let (record, _) = called(ask_part(&table, &wanted, "nic", BOOT));
    let end = finish_prepare_part(&record, &driver("nic"), vec![result(&driver("nic"), Err(transient()))], 2);
    let PrepareEnd::Open(record, _) = end else { panic!("it may come: {end:?}") };
    table.put(record);
    take_part(&mut table, &wanted, "gpu");
    let record = table.claim("uid-one").unwrap();
    assert_eq!(record.state, ClaimState::Preparing, "the nic is open");
    assert!(matches!(ask_part(&table, &wanted, "gpu", BOOT), PrepareStep::Known { changed: false, .. }));
    let (_, drivers) = called(ask_part(&table, &wanted, "nic", BOOT));
    assert_eq!(drivers, [driver("nic")]);
}

#[test]
fn a_part_that_is_refused_for_good_is_rolled_back_alone_and_only_if_it_has_no_other_holder() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a]);
    let refuse = |record: &ClaimRecord| {
        let refused = vec![result(&driver("nic"), Err(permanent()))];
        finish_prepare_part(record, &driver("nic"), refused, 3)
    };
    let table = held(&wanted, &["gpu"]);
    let (record, _) = called(ask_part(&table, &wanted, "nic", BOOT));
    let PrepareEnd::RolledBack(refused, problem) = refuse(&record) else { panic!("for good") };
    assert_eq!(problem, permanent());
    let (back, drivers) = roll_back_part(&refused, &driver("nic"), 4);
    assert_eq!((back.state, drivers), (ClaimState::Prepared, vec![driver("nic")]));
    assert!(back.is_part_leaving(&driver("nic")) && !back.is_part_leaving(&driver("gpu")));
    let end = finish_unprepare(&back, vec![(driver("nic"), Ok(()), 1)], 5);
    assert!(matches!(end, UnprepareEnd::Stays(record) if record.drivers.len() == 1));

    let (alone, _) = called(ask_part(&ClaimTable::default(), &wanted, "nic", BOOT));
    let PrepareEnd::RolledBack(refused, _) = refuse(&alone) else { panic!("for good") };
    assert_eq!(roll_back_part(&refused, &driver("nic"), 4).0.state, ClaimState::Unpreparing);

    let mut shared = ClaimRecord::clone(&record);
    shared.pods.insert(a.uid.clone(), a);
    assert!(matches!(refuse(&shared), PrepareEnd::Open(..)), "a pod asked for it as well");
    let mut of_pod = ClaimRecord::clone(&alone);
    of_pod.pods.insert(uid("uid-b"), pod("b"));
    let results = vec![result(&driver("nic"), Err(permanent()))];
    assert!(matches!(finish_prepare(&of_pod, results, 3), PrepareEnd::Open(..)), "a kubelet as well");
}

#[test]
fn parts_leave_one_by_one_and_the_claim_with_the_last() {
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&pod("a")]);
    let mut table = held(&wanted, &["gpu", "nic"]);
    let (record, drivers) = told(leave_part(&table, &wanted, "gpu"));
    assert_eq!((record.state, drivers), (ClaimState::Prepared, vec![driver("gpu")]));
    assert!(record.drivers[&driver("gpu")].current().is_none(), "what its driver made is void");
    assert_eq!(record.live_claim(&driver("gpu")).unwrap().memo, b"memo");
    table.put(record.clone());
    assert_eq!(waits(ask_part(&table, &wanted, "gpu", BOOT)).code, "claim-unpreparing");
    assert_eq!(waits(ask(&table, &wanted, &pod("a"), BOOT)).code, "claim-unpreparing", "a pod wants all");
    assert!(matches!(ask_part(&table, &wanted, "nic", BOOT), PrepareStep::Known { changed: false, .. }));
    assert_eq!(told(leave_part(&table, &wanted, "gpu")).1, [driver("gpu")], "it is asked again");
    let UnprepareStep::Call { drivers, .. } = unprepare(&table, &wanted.id.uid, None, 6, "upkeep") else {
        panic!("it is tried again")
    };
    assert_eq!(drivers, [driver("gpu")]);

    let end = finish_unprepare(&record, vec![(driver("gpu"), Err(transient()), 1)], 6);
    let UnprepareEnd::Kept(kept, problem) = end else { panic!("{end:?}") };
    assert_eq!((problem, end_of_part(&kept, &driver("gpu"))), (transient(), Err(transient())));
    let (both, _) = told({
        table.put(kept);
        leave_part(&table, &wanted, "nic")
    });
    assert_eq!(both.state, ClaimState::Unpreparing, "it has no holder");
    let end = finish_unprepare(&both, vec![(driver("nic"), Ok(()), 1)], 7);
    let UnprepareEnd::Kept(kept, _) = end else { panic!("{end:?}") };
    assert_eq!(end_of_part(&kept, &driver("nic")), Ok(()), "it is told of its part");
    table.put(kept.clone());
    assert_eq!(leave_part(&table, &wanted, "nic"), UnprepareStep::Nothing);
    assert_eq!(finish_unprepare(&kept, vec![(driver("gpu"), Ok(()), 1)], 8), UnprepareEnd::Gone);
}

#[test]
fn a_part_that_left_and_comes_back_is_held_once() {
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&pod("a")]);
    let mut table = held(&wanted, &["gpu", "nic"]);
    for _ in 0..2 {
        let (record, _) = told(leave_part(&table, &wanted, "gpu"));
        let end = finish_unprepare(&record, vec![(driver("gpu"), Ok(()), 1)], 6);
        let UnprepareEnd::Stays(record) = end else { panic!("the nic stands: {end:?}") };
        table.put(record);
        take_part(&mut table, &wanted, "gpu");
        let mut keys: Vec<_> =
            table.claim("uid-one").unwrap().holds.iter().map(|hold| hold.key.clone()).collect();
        keys.sort();
        assert_eq!(keys, ["gpu.example.com/pool/0", "nic.example.com/pool/0"]);
    }
}

#[test]
fn claims_that_are_unknown_or_not_the_kubelets_are_left() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0"], &[&a]);
    let (table, _) = prepared_for(&wanted, &a);
    assert_eq!(leave_part(&table, &wanted, "gpu"), UnprepareStep::Nothing, "a pod holds it");
    assert_eq!(leave_part(&table, &wanted, "nic"), UnprepareStep::Nothing);
    assert_eq!(leave_part(&table, &claim("one@newer", &[], &[]), "gpu"), UnprepareStep::Nothing);
    let all = unprepare_by_kubelet(&table, &wanted.id.uid, None, 5, "kubelet");
    assert_eq!(all, UnprepareStep::Nothing);
}

/// A record that was rebuilt from a CDI file of an older release does not say who holds it.
#[test]
fn a_claim_of_which_no_holder_is_known_is_unprepared_when_a_kubelet_says_so() {
    let wanted = claim("one", &["gpu/0"], &[&pod("a")]);
    let mut table = held(&wanted, &["gpu"]);
    let mut record = ClaimRecord::clone(table.claim("uid-one").unwrap());
    record.kubelet = None;
    record.drivers.values_mut().for_each(|part| part.kubelet = false);
    table.put(Arc::new(record));
    assert_eq!(told(leave_part(&table, &wanted, "gpu")).0.state, ClaimState::Unpreparing);
}

/// CDI files tell of their own driver's devices, and neither of configs nor of the node.
#[test]
fn a_claim_that_was_rebuilt_is_completed_by_its_source() {
    let a = pod("a");
    let mut wanted = claim("one", &["gpu/0", "nic/0"], &[&a]);
    let rebuilt = held(&claim("one", &["gpu/0"], &[&a]), &["gpu"]);
    wanted.allocation.as_mut().unwrap().node_name = Some("node-1".to_owned());
    let PrepareStep::Known { record, changed: true } = ask_part(&rebuilt, &wanted, "gpu", BOOT) else {
        panic!("the gpu is there")
    };
    assert_eq!(Some(&record.allocation), wanted.allocation.as_ref());
    let (record, drivers) = called(ask(&rebuilt, &wanted, &a, BOOT));
    assert_eq!((drivers, record.drivers.len()), (vec![driver("nic")], 2));
    assert_eq!(record.holds.len(), 2);
    for other in [&["gpu/1", "nic/0"][..], &["gpu/0", "gpu/1"], &["nic/0"]] {
        let step = ask_part(&rebuilt, &claim("one", other, &[&a]), "gpu", BOOT);
        assert!(matches!(step, PrepareStep::Refuse(_)), "{other:?}: {step:?}");
    }
    let complete = held(&wanted, &["gpu"]);
    let step = ask_part(&complete, &claim("one", &["gpu/0", "nic/0"], &[&a]), "gpu", BOOT);
    assert!(matches!(step, PrepareStep::Refuse(_)), "what is known is not taken back: {step:?}");
}

#[test]
fn pods_and_a_kubelet_hold_a_claim_together_and_the_last_takes_it_away() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a]);
    let mut table = held(&wanted, &["gpu"]);
    let (record, drivers) = called(ask(&table, &wanted, &a, BOOT));
    assert_eq!(drivers, [driver("nic")], "the gpu is there");
    let PrepareEnd::Prepared(record) = finish_prepare(&record, vec![done(&record, &driver("nic"))], 3) else {
        panic!("all drivers answered")
    };
    table.put(record);

    let UnprepareStep::Left(left) = leave_part(&table, &wanted, "gpu") else { panic!("the pod holds it") };
    assert_eq!((left.state, &left.kubelet), (ClaimState::Prepared, &None));
    assert_eq!(left.drivers.len(), 2);

    let (left, drivers) = told(unprepare(&table, &wanted.id.uid, Some(&a.uid), 5, "unprepare"));
    assert_eq!((left.state, drivers), (ClaimState::Prepared, vec![driver("nic")]), "the gpu stays");
    assert!(left.pods.is_empty());

    let (all, _) = told({
        let mut table = ClaimTable::default();
        take_part(&mut table, &wanted, "gpu");
        take_part(&mut table, &wanted, "nic");
        let PrepareStep::Known { record, changed: true } = ask(&table, &wanted, &a, BOOT) else {
            panic!("both are there")
        };
        table.put(record);
        let UnprepareStep::Left(left) = unprepare(&table, &wanted.id.uid, Some(&a.uid), 5, "unprepare")
        else {
            panic!("the kubelet holds all of it")
        };
        table.put(left);
        unprepare_by_kubelet(&table, &wanted.id.uid, None, 6, "its pods are gone")
    });
    assert_eq!(all.state, ClaimState::Unpreparing);
    assert!(all.timeline.back().unwrap().cause.starts_with("its pods are gone"));
}

#[test]
fn after_a_boot_a_kubelet_prepares_each_part_again_and_unprepares_the_old() {
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&pod("a")]);
    let mut table = held(&wanted, &["gpu", "nic"]);
    let (record, drivers) = called(ask_part(&table, &wanted, "gpu", "boot-2"));
    assert_eq!((drivers, record.state), (vec![driver("gpu")], ClaimState::Preparing));
    let end = finish_prepare_part(&record, &driver("gpu"), vec![done(&record, &driver("gpu"))], 3);
    let PrepareEnd::Prepared(record) = end else { panic!("{end:?}") };
    table.put(record);
    let (left, _) = told(leave_part(&table, &wanted, "nic"));
    let live = |short: &str| left.live_claim(&driver(short)).unwrap().boot_id;
    assert_eq!((live("nic").as_str(), live("gpu").as_str()), (BOOT, "boot-2"));
    assert_eq!(left.state, ClaimState::Prepared, "the gpu is, and the nic leaves");
}

/// A kubelet asked for one part after a boot while the other's driver was away, and the claim held the other's hardware no more.
#[test]
fn what_is_held_for_a_driver_that_is_not_called_stays_over_a_boot() {
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&pod("a")]);
    let allocation = wanted.allocation.as_ref().unwrap();
    let ask = |table: &ClaimTable, short: &str, boot_id: &str, pci: Option<&str>| {
        let facts = |_: &DriverName, _: &str, _: &str| DeviceFacts {
            identity: pci.into_iter().map(str::to_owned).collect(),
            ..DeviceFacts::default()
        };
        let driver = driver(short);
        let holder = Holder::Kubelet { driver: &driver, given: false };
        let (claim, facts, moved) = (&wanted, &facts, &[]);
        let request =
            PrepareRequest { claim, allocation, holder, facts, moved, boot_id, now_ms: 1, cause: "prepare" };
        called(prepare(table, &request)).0
    };
    let held = |record: &ClaimRecord| {
        let identities = record.holds.iter().filter(|hold| hold.driver.is_some());
        let mut keys: Vec<_> = identities.map(|hold| hold.key.clone()).collect();
        keys.sort();
        keys
    };
    let mut table = ClaimTable::default();
    table.put(ask(&table, "gpu", BOOT, Some("pci:gpu")));
    table.put(ask(&table, "nic", BOOT, Some("pci:nic")));
    let after = ask(&table, "gpu", "boot-2", Some("pci:gpu-moved"));
    assert_eq!(held(&after), ["pci:gpu-moved", "pci:nic"]);
    table.put(after);
    let again = ask(&table, "gpu", "boot-2", None);
    assert_eq!(held(&again), ["pci:gpu-moved", "pci:nic"], "in one boot it stays");
    let last = ask(&table, "nic", "boot-2", Some("pci:nic-moved"));
    assert_eq!(held(&last), ["pci:gpu-moved", "pci:nic-moved"]);
}

#[test]
fn a_refusal_names_the_holders_of_a_claim() {
    let pods: Vec<_> = (0..5).map(|n| pod(&format!("p{n}"))).collect();
    let wanted = claim("one", &["gpu/0"], &pods.iter().collect::<Vec<_>>());
    let table = held(&wanted, &["gpu"]);
    let problem = waits(ask_part(&table, &claim("two", &["gpu/0"], &[]), "gpu", BOOT));
    assert_eq!(problem.code, "device-held");
    assert!(
        problem.message.contains("(UID uid-one, the kubelet for p0, p1, p2, and 2 more) holds"),
        "{problem}"
    );
    let in_use = check_release(table.claim("uid-one").unwrap()).unwrap_err();
    assert!(in_use.code == "claim-in-use" && in_use.message.contains("the kubelet for p0"), "{in_use}");
    let (leaving, _) = told(leave_part(&table, &wanted, "gpu"));
    assert_eq!(check_release(&leaving), Ok(()));
}

/// Records of the release before have none of the kubelet's fields.
#[test]
fn a_record_of_an_older_release_reads_as_held_by_its_pods() {
    let (_, record) = prepared_for(&claim("one", &["gpu/0"], &[&pod("a")]), &pod("a"));
    let json = serde_json::to_value(&*record).unwrap();
    assert!(!json.to_string().contains("kubelet") && !json.to_string().contains("leaving"), "{json}");
    assert_eq!(serde_json::from_value::<ClaimRecord>(json).unwrap(), *record);
}
