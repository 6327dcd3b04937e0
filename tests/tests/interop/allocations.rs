//! Compares allocations with those of the Kubernetes scheduler's allocator, over random histories of claims on one inventory. In every third
//! history devices and claims have keys of hardware, of which the scheduler knows nothing: it gets the devices that others hold as allocated.
//!
//! `NODEDOCK_ORACLE_CASES` and `NODEDOCK_ORACLE_SEED` set another number of claims, and another first seed:
//!
//! ```sh
//! NODEDOCK_ORACLE_CASES=100000 cargo test --workspace --features nodedock/failpoints --test interop -- allocations
//! ```

mod generate;
mod keys;

use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::jiff::Timestamp;
use nodedock_allocator::allocate::{
    Bounds, InUse, Inventory, NodeRef, NotAllocated, NotAllocatedKind, allocate,
};
use nodedock_model::quantity;
use nodedock_tests::machine::or_skip;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use generate::Random;
use keys::{Event, Keys};

use crate::programs;

/// Seeds of histories that every run compares, without keys and with them, beside its claims. A seed on which the two have differed is added
/// here. Of these, the first has mostly claims that are allocated, the second mostly claims that the official allocator refuses with an error,
/// the next two have admin access to devices with counters, and the last has one name for two devices of a pool, which are for two nodes.
const KEPT_SEEDS: &[u64] = &[2_003, 100_003, 424_242, 999_983, 5_003_345];

const CLAIMS_DEFAULT: usize = 20_000;
const CLAIMS_OF_HISTORY: usize = 25;
/// One of this many histories has keys.
const WITH_KEYS: u64 = 3;

/// Bounds for a hundred claims: the maximum that is not compared, mostly because the official allocator was slow, and the minimums that are
/// allocated and refused. For a hundred in histories with keys: the minimums that end in another way than without them, and that have two
/// devices that would exclude each other in two claims. With fewer claims than the default, one history weighs too much for all but the
/// first.
const NOT_COMPARED_PERCENT_MAX: usize = 10;
const ALLOCATED_PERCENT_MIN: usize = 20;
const REFUSED_PERCENT_MIN: usize = 20;
const BY_KEYS_PERCENT_MIN: usize = 10;
const MEET_WITHIN_PERCENT_MIN: usize = 1;

/// Why a lock cannot be had.
const FAILED: &str = "another comparison did not fail";

/// The official allocator has no bound but this one.
const TIMEOUT_MILLIS: u64 = 2_000;

struct Oracle {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AllocationReport {
    allocatable: bool,
    allocation: Option<Value>,
    #[serde(default)]
    error: String,
    #[serde(default)]
    timed_out: bool,
    valid: bool,
}

impl Oracle {
    fn start(program: &Path) -> Self {
        let mut command = Command::new(program);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the oracle starts");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self {
            child,
            input,
            output,
        }
    }

    /// Returns an answer for each case of a history.
    fn ask(&mut self, history: &Value) -> Vec<AllocationReport> {
        // Written as a whole: each write to the pipe is a call of the system.
        let mut line = history.to_string();
        line.push('\n');
        self.input
            .write_all(line.as_bytes())
            .expect("the oracle reads");
        let mut line = String::new();
        self.output
            .read_line(&mut line)
            .expect("the oracle answers");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("oracle said {line:?}: {error}"))
    }
}

impl Drop for Oracle {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Counts of compared results.
#[derive(Debug, Default)]
struct Tally {
    compared: usize,
    allocated: usize,
    refused: usize,
    errors: usize,
    /// The official allocator did not end in time, or ours reached a bound. A choice of ours is valid all the same.
    not_compared: usize,
    /// Admin access to devices with counters, which the official allocator wants and ours does not.
    admin_counters: usize,
    /// Number in histories with keys.
    with_keys: usize,
    /// Number of those that end in another way without keys.
    by_keys: usize,
    /// Number of those that have two devices that would exclude each other in two claims.
    meet_within: usize,
}

type Allocated = Result<AllocationResult, NotAllocated>;

/// A claim, what was in use before it, and what it got.
struct Case {
    input: Value,
    ours: Allocated,
    choice: Option<Value>,
    by_keys: Option<ByKeys>,
}

/// Effect of keys on a claim, in a history with keys.
struct ByKeys {
    /// True if it ends in another way without them.
    decide: bool,
    /// Two of its devices would exclude each other in two claims.
    meet_within: bool,
}

/// A claim that has devices.
struct Holder {
    uid: String,
    allocation: AllocationResult,
    json: Value,
}

struct History {
    seed: u64,
    slices: Vec<Value>,
    classes: Vec<Value>,
    inventory: Inventory,
    class_objects: HashMap<String, Arc<DeviceClass>>,
    in_use: InUse,
    keys: Option<Keys>,
    holders: Vec<Holder>,
    has_counters: bool,
    shares: usize,
    cases: Vec<Case>,
}

fn parsed<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{value}: {error}"))
}

fn json_of(allocation: &AllocationResult) -> Value {
    serde_json::to_value(allocation).expect("it serializes")
}

/// The claims that have devices, as their keys are looked at.
fn allocations(holders: &[Holder]) -> impl Iterator<Item = (&str, &AllocationResult)> {
    holders
        .iter()
        .map(|holder| (holder.uid.as_str(), &holder.allocation))
}

impl History {
    fn new(seed: u64, has_keys: bool) -> Self {
        let mut random = Random::new(seed);
        let profile = generate::profile(&mut random);
        let (slices, classes) = (
            generate::slices(&mut random, &profile),
            generate::classes(&mut random),
        );
        let node = generate::node();
        let node = NodeRef {
            name: generate::NODE.to_owned(),
            labels: parsed(&node["metadata"]["labels"]),
        };
        let inventory = Inventory::new(
            slices
                .iter()
                .map(|slice| Arc::new(parsed::<ResourceSlice>(slice))),
            &node,
        );
        let class = |class: &Value| {
            let class: DeviceClass = parsed(class);
            (
                class.metadata.name.clone().expect("a name"),
                Arc::new(class),
            )
        };
        let consumes = |slice: &Value| slice["spec"]["sharedCounters"].is_array();
        let mut history = Self {
            seed,
            inventory,
            class_objects: classes.iter().map(class).collect(),
            in_use: InUse::default(),
            keys: has_keys.then(|| Keys::new(seed, &slices)),
            holders: Vec::new(),
            has_counters: slices.iter().any(consumes),
            slices,
            classes,
            shares: 0,
            cases: Vec::new(),
        };
        history.use_all();
        for number in 0..CLAIMS_OF_HISTORY {
            let claim = generate::claim(&mut random, &profile);
            history.claim(number, &claim);
            while random.percent(45) {
                history.release(&mut random);
            }
            history.check_in_the_way();
        }
        history
    }

    /// Counts what is in use from the beginning.
    fn use_all(&mut self) {
        self.in_use = self.keys.as_ref().map_or_else(InUse::default, |keys| {
            InUse::new(Arc::new(keys.of_devices()))
        });
        for (uid, allocation) in allocations(&self.holders) {
            self.in_use.add(uid, allocation);
        }
        for (uid, holds) in self.keys.iter().flat_map(Keys::of_claims) {
            self.in_use.hold(uid, holds);
        }
    }

    fn claim(&mut self, number: usize, claim: &Value) {
        let ours = self.allocate(&self.in_use, claim, self.shares);
        let choice = ours.as_ref().ok().map(json_of);
        let held = self
            .keys
            .as_ref()
            .map(|keys| keys.held(allocations(&self.holders)));
        let input = json!({
            "allocated": self.holders.iter().map(|holder| &holder.json).collect::<Vec<_>>(),
            "held": held,
            "claim": claim,
            "choice": choice,
        });
        let by_keys = self.by_keys(claim, &ours);
        let uid = format!("claim-{number}");
        if let (Ok(allocation), Some(json)) = (&ours, &choice) {
            self.shares += keys::results(allocation).len();
            self.in_use.add(&uid, allocation);
            let (allocation, json) = (allocation.clone(), json.clone());
            self.holders.push(Holder {
                uid: uid.clone(),
                allocation,
                json,
            });
        }
        let allocation = ours
            .as_ref()
            .ok()
            .map(|allocation| (uid.as_str(), allocation));
        let events = self
            .keys
            .as_mut()
            .map(|keys| keys.events(allocation, number));
        for event in events.into_iter().flatten() {
            match event {
                Event::Hold(uid, holds) => self.in_use.hold(&uid, &holds),
                Event::Release(uid) => self.in_use.remove(&uid),
                Event::Devices => self.use_all(),
            }
        }
        self.cases.push(Case {
            input,
            ours,
            choice,
            by_keys,
        });
    }

    fn by_keys(&self, claim: &Value, ours: &Allocated) -> Option<ByKeys> {
        let keys = self.keys.as_ref()?;
        let mut by_name = InUse::default();
        for (uid, allocation) in allocations(&self.holders) {
            by_name.add(uid, allocation);
        }
        let without = self.allocate(&by_name, claim, self.shares);
        let decide = without.as_ref().ok() != ours.as_ref().ok();
        Some(ByKeys {
            decide,
            meet_within: ours.as_ref().is_ok_and(|ours| keys.meet_within(ours)),
        })
    }

    fn allocate(&self, in_use: &InUse, claim: &Value, mut shares: usize) -> Allocated {
        let claim: ResourceClaim = parsed(claim);
        let classes = |name: &str| self.class_objects.get(name).cloned();
        let mut share_id = || {
            shares += 1;
            format!("00000000-0000-4000-8000-{shares:012}")
        };
        let now = Timestamp::UNIX_EPOCH;
        allocate(
            &self.inventory,
            in_use,
            &classes,
            &claim,
            &Bounds::default(),
            now,
            &mut share_id,
        )
    }

    fn release(&mut self, random: &mut Random) {
        if !self.holders.is_empty() {
            let place = random.below(self.holders.len());
            let Holder { uid, .. } = self.holders.swap_remove(place);
            self.in_use.remove(&uid);
            self.keys.iter_mut().for_each(|keys| keys.remove(&uid));
        }
    }

    /// Checks conflicts. A claim's own holds do not conflict with it.
    fn check_in_the_way(&self) {
        let Some(keys) = &self.keys else { return };
        for (uid, expected) in keys.in_the_way(allocations(&self.holders)) {
            let found: BTreeSet<&str> = self.in_use.in_the_way(uid).collect();
            assert_eq!(found, expected, "in the way of {uid}, seed {}", self.seed);
        }
    }

    fn question(&self, cases: &[&Value]) -> Value {
        json!({
            "node": generate::node(),
            "slices": self.slices,
            "classes": self.classes,
            "cases": cases,
            "timeoutMillis": TIMEOUT_MILLIS,
        })
    }

    fn compare(&self, oracle: &mut Oracle, tally: &Mutex<Tally>) {
        let inputs: Vec<&Value> = self.cases.iter().map(|case| &case.input).collect();
        let answers = oracle.ask(&self.question(&inputs));
        assert_eq!(answers.len(), self.cases.len(), "seed {}", self.seed);
        let mut tally = tally.lock().expect(FAILED);
        for (case, answer) in self.cases.iter().zip(&answers) {
            self.judge(case, answer, &mut tally);
        }
    }

    fn judge(&self, case: &Case, answer: &AllocationReport, tally: &mut Tally) {
        let Case {
            input,
            ours,
            choice,
            by_keys,
        } = case;
        let context = || {
            let question = self.question(&[input]);
            format!(
                "seed {}\nquestion {question}\nours {ours:?}\noracle {answer:?}",
                self.seed
            )
        };
        tally.compared += 1;
        if let Some(by_keys) = by_keys {
            tally.with_keys += 1;
            tally.by_keys += usize::from(by_keys.decide);
            tally.meet_within += usize::from(by_keys.meet_within);
        }
        let differs = self.has_counters && has_admin_access(&input["claim"]);
        if answer.timed_out
            || ours
                .as_ref()
                .is_err_and(|error| error.kind == NotAllocatedKind::TooComplex)
        {
            tally.not_compared += 1;
            assert!(
                ours.is_err() || answer.valid || differs,
                "not valid: {}",
                context()
            );
            return;
        }
        if differs {
            tally.admin_counters += 1;
            assert!(
                ours.is_ok() || !answer.allocatable,
                "only the oracle allocates: {}",
                context()
            );
            return;
        }
        match (choice, answer.allocation.as_ref()) {
            (Some(choice), Some(allocation)) => {
                tally.allocated += 1;
                assert_eq!(
                    comparable(choice),
                    comparable(allocation),
                    "different: {}",
                    context()
                );
                assert!(answer.valid, "not valid: {}", context());
            }
            (None, None) => {
                assert!(
                    !answer.allocatable,
                    "an allocation is missing: {}",
                    context()
                );
                tally.refused += 1;
                tally.errors += usize::from(!answer.error.is_empty());
            }
            (Some(_), None) => panic!("only ours allocates: {}", context()),
            (None, Some(_)) => panic!("only the oracle allocates: {}", context()),
        }
    }
}

fn has_admin_access(claim: &Value) -> bool {
    let requests = claim["spec"]["devices"]["requests"]
        .as_array()
        .expect("requests");
    requests
        .iter()
        .any(|request| request["exactly"]["adminAccess"] == true)
}

/// Leaves out what is random or empty, and writes quantities in one form.
fn comparable(value: &Value) -> Value {
    match value {
        Value::Object(object) => {
            let fields = object
                .iter()
                .filter(|(name, _)| *name != "allocationTimestamp" && *name != "shareID");
            let fields = fields.map(|(name, value)| match name.as_str() {
                "consumedCapacity" => (name.clone(), amounts(value)),
                _ => (name.clone(), comparable(value)),
            });
            let empty = |value: &Value| {
                value.is_null() || value == &json!([]) || value == &json!({}) || value == &json!("")
            };
            fields.filter(|(_, value)| !empty(value)).collect()
        }
        Value::Array(list) => list.iter().map(comparable).collect(),
        other => other.clone(),
    }
}

fn amounts(capacities: &Value) -> Value {
    let capacities = capacities.as_object().into_iter().flatten();
    let amount =
        |value: &Value| Value::from(quantity::normalized(value.as_str().expect("a quantity")));
    capacities
        .map(|(name, value)| (name.clone(), amount(value)))
        .collect()
}

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn allocations_are_those_of_the_scheduler() {
    let what = "allocations, by the scheduler's library";
    let Some(program) = or_skip(what, programs::go("allocator-oracle")) else {
        return;
    };
    let claims = number("NODEDOCK_ORACLE_CASES", CLAIMS_DEFAULT);
    let first = u64::try_from(number("NODEDOCK_ORACLE_SEED", 1)).expect("64 bits");
    let histories = claims.div_ceil(CLAIMS_OF_HISTORY);
    let kept = KEPT_SEEDS
        .iter()
        .flat_map(|seed| [(*seed, false), (*seed, true)]);
    let random = (first..)
        .take(histories)
        .map(|seed| (seed, seed.is_multiple_of(WITH_KEYS)));
    let seeds = Mutex::new(kept.chain(random));
    let tally = Mutex::new(Tally::default());
    let compare = || {
        let mut oracle = Oracle::start(&program);
        loop {
            let next = seeds.lock().expect(FAILED).next();
            let Some((seed, has_keys)) = next else { break };
            History::new(seed, has_keys).compare(&mut oracle, &tally);
        }
    };
    thread::scope(|scope| {
        let workers = thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(compare)).collect();
        for worker in workers {
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    let tally = tally.into_inner().expect(FAILED);
    eprintln!("{tally:?}");
    assert!(
        tally.not_compared * 100 <= tally.compared * NOT_COMPARED_PERCENT_MAX,
        "{tally:?}"
    );
    if claims >= CLAIMS_DEFAULT {
        let is_enough = |count: usize, of: usize, percent: usize| count * 100 >= of * percent;
        assert!(
            is_enough(tally.allocated, tally.compared, ALLOCATED_PERCENT_MIN),
            "{tally:?}"
        );
        assert!(
            is_enough(tally.refused, tally.compared, REFUSED_PERCENT_MIN),
            "{tally:?}"
        );
        assert!(
            is_enough(tally.by_keys, tally.with_keys, BY_KEYS_PERCENT_MIN),
            "{tally:?}"
        );
        assert!(
            is_enough(tally.meet_within, tally.with_keys, MEET_WITHIN_PERCENT_MIN),
            "{tally:?}"
        );
    }
}
