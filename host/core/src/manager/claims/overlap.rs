//! Checks whether the devices of a claim fit beside those of other claims: counters of pools, capacities of shared devices, and
//! compatibility groups. A scheduler decides the same from slices that may be old, and a kubelet does not check. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::name_few;
use crate::records::table::ClaimTable;
use nodedock_model::{Hold, ObjectRef, Problem, ProblemCode, Use, quantity};

/// Claims that a problem names.
const CLAIMS_NAMED_MAX: usize = 3;

/// Why a claim does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Overlap {
    pub(super) problem: Problem,
    /// Others have to be unprepared first. Without them it never fits.
    pub(super) others: bool,
}

/// A device's use of one thing.
struct User<'a> {
    /// None: of a device that no claim has yet.
    claim: Option<&'a ObjectRef>,
    device: &'a str,
    used: &'a Use,
}

/// Returns the claims beside which a device that none of them has does not fit.
pub(super) fn in_the_way(table: &ClaimTable, device: &Hold) -> BTreeSet<ObjectRef> {
    let mut claims = BTreeSet::new();
    for used in &device.uses {
        let others = table.users_of_thing(&used.of);
        let others: Vec<_> = others
            .flat_map(|record| users(Some(&record.id), &record.holds, &used.of))
            .collect();
        let own = [User {
            claim: None,
            device: &device.key,
            used,
        }];
        if check_one(&used.of, &own, &others).is_err() {
            claims.extend(others.iter().filter_map(|other| other.claim).cloned());
        }
    }
    claims
}

/// Checks the holds of a claim by themselves, and then against those of all others.
pub(super) fn check(table: &ClaimTable, id: &ObjectRef, holds: &[Hold]) -> Result<(), Overlap> {
    let things: BTreeSet<&str> = holds
        .iter()
        .flat_map(|hold| &hold.uses)
        .map(|used| used.of.as_str())
        .collect();
    for thing in &things {
        check_one(thing, &users(Some(id), holds, thing), &[])?;
    }
    for thing in things {
        let others = table
            .users_of_thing(thing)
            .filter(|record| record.id.uid != id.uid);
        let others: Vec<_> = others
            .flat_map(|record| users(Some(&record.id), &record.holds, thing))
            .collect();
        check_one(thing, &users(Some(id), holds, thing), &others)?;
    }
    Ok(())
}

/// Returns whether devices that no claim has yet fit, by themselves and beside those of all claims.
pub(super) fn fits(table: &ClaimTable, holds: &[Hold]) -> bool {
    let things: BTreeSet<&str> = holds
        .iter()
        .flat_map(|hold| &hold.uses)
        .map(|used| used.of.as_str())
        .collect();
    things.into_iter().all(|thing| {
        let own = users(None, holds, thing);
        let others = table.users_of_thing(thing);
        let others: Vec<_> = others
            .flat_map(|record| users(Some(&record.id), &record.holds, thing))
            .collect();
        check_one(thing, &own, &[]).is_ok() && check_one(thing, &own, &others).is_ok()
    })
}

fn check_one(thing: &str, own: &[User<'_>], others: &[User<'_>]) -> Result<(), Overlap> {
    match own.iter().any(|user| user.used.whole.is_empty()) {
        true => check_groups(thing, own, others),
        false => check_amounts(thing, own, others),
    }
}

fn users<'a>(claim: Option<&'a ObjectRef>, holds: &'a [Hold], thing: &str) -> Vec<User<'a>> {
    holds
        .iter()
        .flat_map(|hold| {
            let used = hold.uses.iter().filter(|used| used.of == thing);
            used.map(|used| User {
                claim,
                device: &hold.key,
                used,
            })
            .collect::<Vec<_>>()
        })
        .collect()
}

fn check_amounts(thing: &str, own: &[User<'_>], others: &[User<'_>]) -> Result<(), Overlap> {
    // The newest facts are those of the request.
    let whole = own.first().map_or("0", |user| user.used.whole.as_str());
    let (wanted, used) = (sum(thing, own.iter()), sum(thing, others.iter()));
    let all = sum(thing, own.iter().chain(others));
    if all <= amount(whole) {
        return Ok(());
    }
    let claim = own
        .first()
        .and_then(|user| user.claim)
        .map(ToString::to_string)
        .unwrap_or_default();
    let (wanted_text, used_text) = (quantity::of_nanos(wanted), quantity::of_nanos(used));
    let by = holders(others);
    let (code, what) = match is_capacity(thing) {
        true => (ProblemCode::CapacityExceeded, "the capacity"),
        false => (ProblemCode::CounterExceeded, "the counter"),
    };
    let message = match others.is_empty() {
        true => format!("claim {claim} wants {wanted_text} of {what} {thing}, which is {whole}"),
        false => format!(
            "claim {claim} wants {wanted_text} of {what} {thing}, of which {by} use {used_text} of {whole}"
        ),
    };
    let problem = problem(code, message, others)
        .with("of", thing)
        .with("wanted", &wanted_text);
    let problem = problem.with("used", &used_text).with("whole", whole);
    Err(Overlap {
        problem,
        others: !others.is_empty(),
    })
}

/// Returns the problem of a claim that does not fit. Without other claims it is permanent: the claim never fits.
fn problem(code: ProblemCode, message: String, others: &[User<'_>]) -> Problem {
    match others.is_empty() {
        true => Problem::invalid(code, message),
        false => Problem::conflict(code, message),
    }
}

fn is_capacity(thing: &str) -> bool {
    thing.contains('@')
}

/// A counter is used once by a device, in however many claims it is; a capacity by each share.
fn sum<'a>(thing: &str, users: impl Iterator<Item = &'a User<'a>>) -> i128 {
    let amounts = users.map(|user| (user.device, amount(&user.used.amount)));
    if is_capacity(thing) {
        return amounts
            .map(|(_, amount)| amount)
            .fold(0, i128::saturating_add);
    }
    let mut by_device = BTreeMap::new();
    for (device, amount) in amounts {
        let known = by_device.entry(device).or_insert(amount);
        *known = amount.max(*known);
    }
    by_device.into_values().fold(0, i128::saturating_add)
}

/// Parses a quantity. Text that is no quantity counts as more than anything has.
fn amount(text: &str) -> i128 {
    quantity::nanos(text).unwrap_or(i128::MAX)
}

/// All devices at a counter set have a group in common, or none has any.
fn check_groups(thing: &str, own: &[User<'_>], others: &[User<'_>]) -> Result<(), Overlap> {
    let all: Vec<_> = own.iter().chain(others).map(groups).collect();
    let common = all.iter().skip(1).fold(
        all.first().cloned().unwrap_or_default(),
        |common, groups| &common & groups,
    );
    if all.iter().all(BTreeSet::is_empty) || !common.is_empty() {
        return Ok(());
    }
    let claim = own
        .first()
        .and_then(|user| user.claim)
        .map(ToString::to_string)
        .unwrap_or_default();
    let (mine, theirs) = (shown_groups(own), shown_groups(others));
    let message = match others.is_empty() {
        true => format!(
            "devices of claim {claim} at {thing} have no compatibility group in common: {mine}"
        ),
        false => format!(
            "the device of claim {claim} at {thing} has the compatibility groups {mine}, and those of {} have {theirs}",
            holders(others)
        ),
    };
    let problem = problem(ProblemCode::IncompatibleGroups, message, others).with("of", thing);
    Err(Overlap {
        problem,
        others: !others.is_empty(),
    })
}

fn shown_groups(users: &[User<'_>]) -> String {
    let all: BTreeSet<_> = users.iter().flat_map(groups).collect();
    if all.is_empty() {
        "none".to_owned()
    } else {
        all.into_iter().collect::<Vec<_>>().join(", ")
    }
}

fn groups(user: &User<'_>) -> BTreeSet<String> {
    user.used
        .groups
        .iter()
        .cloned()
        .collect::<BTreeSet<String>>()
}

fn holders(others: &[User<'_>]) -> String {
    let claims: BTreeSet<_> = others.iter().filter_map(|user| user.claim).collect();
    format!("claims {}", name_few(claims.into_iter(), CLAIMS_NAMED_MAX))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::manager::claims::fixtures::{claim, driver, uid};
    use crate::manager::claims::machine::{CounterFacts, DeviceFacts, holds};
    use nodedock_model::{Claim, ClaimRecord, ClaimState};

    const DEVICES: usize = 5;
    const WHOLE: u32 = 10;

    /// Use of the only counter by a device, and the device's groups.
    type Taken = (u32, Vec<String>);

    fn facts_of(taken: &[Taken], device: &str) -> DeviceFacts {
        let (amount, groups) = &taken[device.parse::<usize>().expect("devices are numbers")];
        let counter = CounterFacts {
            set: "set".into(),
            counter: "memory".into(),
            amount: format!("{amount}Gi"),
            whole: format!("{WHOLE}Gi"),
        };
        DeviceFacts {
            allow_multiple_allocations: true,
            counters: vec![counter],
            groups: [("set".to_owned(), groups.clone())].into(),
            capacities: [("bandwidth".to_owned(), WHOLE.to_string())].into(),
            ..DeviceFacts::default()
        }
    }

    fn record(claim: &Claim, taken: &[Taken]) -> ClaimRecord {
        let allocation = claim.allocation.clone().expect("it is allocated");
        let mut record = ClaimRecord::new(claim.id.clone(), ClaimState::Prepared, "boot-1");
        record.holds = holds(&allocation, |_, _, device| facts_of(taken, device));
        record.allocation = allocation;
        record
    }

    /// A claim with shares of devices, each of so much bandwidth.
    fn wanted(name: &str, devices: &[(usize, u32)]) -> Claim {
        let shares: Vec<_> = (0..)
            .zip(devices)
            .map(|(n, (device, _))| format!("gpu/{device}#{n}"))
            .collect();
        let shares: Vec<_> = shares.iter().map(String::as_str).collect();
        let mut claim = claim(name, &shares, &[]);
        let allocated = claim
            .allocation
            .iter_mut()
            .flat_map(|allocation| &mut allocation.devices);
        for (device, (_, bandwidth)) in allocated.zip(devices) {
            device
                .consumed
                .insert("bandwidth".into(), bandwidth.to_string());
        }
        claim
    }

    /// Returns whether claims fit together, by their devices alone.
    fn fit(claims: &[&Vec<(usize, u32)>], taken: &[Taken]) -> bool {
        let all = || claims.iter().copied().flatten();
        let devices: BTreeSet<usize> = all().map(|(device, _)| *device).collect();
        let memory: u32 = devices.iter().map(|device| taken[*device].0).sum();
        let bandwidth = |device: usize| {
            all()
                .filter(|(of, _)| *of == device)
                .map(|(_, share)| share)
                .sum::<u32>()
        };
        let groups: Vec<&Vec<String>> = devices.iter().map(|device| &taken[*device].1).collect();
        let common = |group: &String| groups.iter().all(|groups| groups.contains(group));
        let is_compatible = groups.iter().all(|groups| groups.is_empty())
            || groups.first().is_some_and(|first| first.iter().any(common));
        memory <= WHOLE && devices.iter().all(|device| bandwidth(*device) <= WHOLE) && is_compatible
    }

    fn taken() -> impl Strategy<Value = Vec<Taken>> {
        let groups = prop_oneof![
            3 => Just(Vec::new()),
            1 => Just(vec!["mig".to_owned()]),
            1 => Just(vec!["vgpu".to_owned(), "mig".to_owned()]),
        ];
        prop::collection::vec((0..7u32, groups), DEVICES)
    }

    proptest! {
        /// A claim is refused if and only if the claims that are there and it do not fit, and it may wait if it fits alone.
        #[test]
        fn claims_are_refused_unless_they_fit(
            taken in taken(),
            steps in prop::collection::vec((0..6usize, prop::collection::vec((0..DEVICES, 0..7u32), 1..4)), 1..20),
        ) {
            let (mut table, mut there) = (ClaimTable::default(), BTreeMap::<usize, Vec<(usize, u32)>>::new());
            for (name, devices) in steps {
                let id = format!("claim-{name}");
                if there.remove(&name).is_some() {
                    table.remove(&uid(&format!("uid-{id}")));
                    continue;
                }
                let record = record(&wanted(&id, &devices), &taken);
                let all: Vec<_> = there.values().chain([&devices]).collect();
                let checked = check(&table, &record.id, &record.holds);
                prop_assert_eq!(checked.is_ok(), fit(&all, &taken), "{:?}", checked);
                match checked {
                    Ok(()) => {
                        table.put(Arc::new(record));
                        there.insert(name, devices);
                    }
                    Err(overlap) => prop_assert_eq!(overlap.others, fit(&[&devices], &taken), "{:?}", overlap),
                }
            }
        }
    }

    #[test]
    fn refusal_names_amounts_and_claims() {
        let taken = [
            (6, Vec::new()),
            (5, Vec::new()),
            (1, vec!["mig".to_owned()]),
            (11, Vec::new()),
            (0, Vec::new()),
        ];
        let mut table = ClaimTable::default();
        table.put(Arc::new(record(&wanted("one", &[(0, 4)]), &taken)));
        let problem = |devices: &[(usize, u32)]| {
            let record = record(&wanted("two", devices), &taken);
            let overlap = check(&table, &record.id, &record.holds).expect_err("it does not fit");
            (
                overlap.problem.code.clone(),
                overlap.problem.message,
                overlap.others,
            )
        };
        let (code, message, others) = problem(&[(1, 1)]);
        assert_eq!((code.as_str(), others), ("counter-exceeded", true));
        let expected = "claim default/two wants 5Gi of the counter gpu.example.com/pool#set/memory, of which claims default/one use 6Gi of 10Gi";
        assert_eq!(message, expected);
        let (code, message, others) = problem(&[(0, 7)]);
        assert_eq!((code.as_str(), others), ("capacity-exceeded", true));
        assert!(
            message.contains("wants 7 of the capacity") && message.contains("use 4 of 10"),
            "{message}"
        );
        let (code, message, others) = problem(&[(2, 1)]);
        assert_eq!((code.as_str(), others), ("incompatible-groups", true));
        assert!(
            message.contains("mig") && message.contains("none"),
            "{message}"
        );
        table.remove(&uid("uid-one"));
        let record = record(&wanted("two", &[(3, 1)]), &taken);
        let alone = check(&table, &record.id, &record.holds).expect_err("it does not fit");
        assert!(
            alone.problem.message.ends_with(
                "wants 11Gi of the counter gpu.example.com/pool#set/memory, which is 10Gi"
            )
        );
        assert!(
            !alone.others && alone.problem.kind.is_permanent(),
            "{alone:?}"
        );
    }

    #[test]
    fn conflicting_claims_of_device_are_found() {
        let taken = [(6, Vec::new()), (5, Vec::new()), (4, Vec::new())];
        let mut table = ClaimTable::default();
        table.put(Arc::new(record(&wanted("one", &[(0, 1)]), &taken)));
        let in_the_way = |device: &str| {
            let hold = facts_of(&taken, device)
                .hold(&driver("gpu"), "pool", device)
                .expect("it takes memory");
            in_the_way(&table, &hold)
                .into_iter()
                .map(|claim| claim.uid.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(in_the_way("1"), ["uid-one"]);
        assert_eq!(
            [in_the_way("0"), in_the_way("2")],
            [Vec::<String>::new(), Vec::new()]
        );
    }

    #[test]
    fn what_is_no_quantity_fits_nowhere() {
        let mut record = record(&wanted("one", &[(0, 1)]), &[(1, Vec::new())]);
        record.holds[0].uses[0].amount = "much".to_owned();
        let overlap =
            check(&ClaimTable::default(), &record.id, &record.holds).expect_err("it is not read");
        assert!(!overlap.others && overlap.problem.code == "counter-exceeded");
    }
}
