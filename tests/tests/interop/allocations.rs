//! Compares allocations with those of the Kubernetes scheduler's allocator, over random histories of claims on one inventory.
//!
//! `NODEDOCK_ORACLE_CASES` and `NODEDOCK_ORACLE_SEED` set another number of claims, and another first seed:
//!
//! ```sh
//! NODEDOCK_ORACLE_CASES=100000 cargo test --workspace --features nodedock/failpoints --test interop -- allocations
//! ```

mod generate;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

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

use crate::programs;

/// Seeds of histories that every run compares, beside its claims. A seed on which the two have differed is added here. Of these, the first has
/// mostly claims that are allocated, the second mostly claims that the official allocator refuses with an error, and the others have admin
/// access to devices with counters.
const KEPT_SEEDS: &[u64] = &[2_003, 100_003, 424_242, 999_983];

const CLAIMS_DEFAULT: usize = 2_000;
const CLAIMS_OF_INVENTORY: usize = 25;

/// Of a hundred claims, how many may not be compared, mostly because the official allocator was slow, and how many have at least to be allocated and refused. With fewer claims than the
/// default, one history weighs too much for the latter.
const NOT_COMPARED_PERCENT_MAX: usize = 10;
const ALLOCATED_PERCENT_MIN: usize = 20;
const REFUSED_PERCENT_MIN: usize = 20;

/// The official allocator has no bound but this one.
const TIMEOUT_MILLIS: u64 = 2_000;

struct Oracle {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
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
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the oracle starts");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, input, output }
    }

    fn ask(&mut self, case: &Value) -> Answer {
        writeln!(self.input, "{case}").expect("the oracle reads");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the oracle answers");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("oracle said {line:?}: {error}"))
    }
}

impl Drop for Oracle {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// How often what was compared.
#[derive(Debug, Default)]
struct Tally {
    allocated: usize,
    refused: usize,
    errors: usize,
    /// The official allocator did not end in time, or ours reached a bound. A choice of ours is valid all the same.
    not_compared: usize,
    /// Admin access to devices with counters, which the official allocator wants and ours does not.
    admin_counters: usize,
}

struct History {
    seed: u64,
    slices: Vec<Value>,
    classes: Vec<Value>,
    inventory: Inventory,
    class_objects: HashMap<String, Arc<DeviceClass>>,
    in_use: InUse,
    /// Allocations by UID of the claim.
    allocated: Vec<(String, Value)>,
    has_counters: bool,
}

fn parsed<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{value}: {error}"))
}

impl History {
    fn new(seed: u64, random: &mut Random, profile: &generate::Profile) -> Self {
        let (slices, classes) = (generate::slices(random, profile), generate::classes(random));
        let node = generate::node();
        let node = NodeRef { name: generate::NODE.to_owned(), labels: parsed(&node["metadata"]["labels"]) };
        let inventory =
            Inventory::new(slices.iter().map(|slice| Arc::new(parsed::<ResourceSlice>(slice))), &node);
        let class = |class: &Value| {
            let class: DeviceClass = parsed(class);
            (class.metadata.name.clone().expect("a name"), Arc::new(class))
        };
        let consumes = |slice: &Value| slice["spec"]["sharedCounters"].is_array();
        Self {
            seed,
            inventory,
            class_objects: classes.iter().map(class).collect(),
            in_use: InUse::default(),
            allocated: Vec::new(),
            has_counters: slices.iter().any(consumes),
            slices,
            classes,
        }
    }

    fn allocate(&self, claim: &Value, shares: &mut usize) -> Result<AllocationResult, NotAllocated> {
        let claim: ResourceClaim = parsed(claim);
        let classes = |name: &str| self.class_objects.get(name).cloned();
        let mut share_id = || {
            *shares += 1;
            format!("00000000-0000-4000-8000-{shares:012}")
        };
        let now = Timestamp::UNIX_EPOCH;
        allocate(&self.inventory, &self.in_use, &classes, &claim, &Bounds::default(), now, &mut share_id)
    }

    fn compare(
        &self,
        oracle: &mut Oracle,
        claim: &Value,
        ours: &Result<AllocationResult, NotAllocated>,
        tally: &mut Tally,
    ) {
        let choice = ours.as_ref().ok().map(|choice| serde_json::to_value(choice).expect("it serializes"));
        let allocated: Vec<&Value> = self.allocated.iter().map(|(_, allocation)| allocation).collect();
        let case = json!({
            "node": generate::node(),
            "slices": self.slices,
            "classes": self.classes,
            "allocated": allocated,
            "claim": claim,
            "choice": choice,
            "timeoutMillis": TIMEOUT_MILLIS,
        });
        let answer = oracle.ask(&case);
        let context = || format!("seed {}\ncase {case}\nours {ours:?}\noracle {answer:?}", self.seed);
        let differs = self.has_counters && has_admin_access(claim);
        if answer.timed_out || ours.as_ref().is_err_and(|error| error.kind == NotAllocatedKind::TooComplex) {
            tally.not_compared += 1;
            assert!(ours.is_err() || answer.valid || differs, "not valid: {}", context());
            return;
        }
        if differs {
            tally.admin_counters += 1;
            assert!(ours.is_ok() || !answer.allocatable, "only the oracle allocates: {}", context());
            return;
        }
        match (&choice, answer.allocation.as_ref()) {
            (Some(choice), Some(allocation)) => {
                tally.allocated += 1;
                assert_eq!(comparable(choice), comparable(allocation), "different: {}", context());
                assert!(answer.valid, "not valid: {}", context());
            }
            (None, None) => {
                assert!(!answer.allocatable, "an allocation is missing: {}", context());
                tally.refused += 1;
                tally.errors += usize::from(!answer.error.is_empty());
            }
            (Some(_), None) => panic!("only ours allocates: {}", context()),
            (None, Some(_)) => panic!("only the oracle allocates: {}", context()),
        }
    }

    fn add(&mut self, uid: String, allocation: &AllocationResult) {
        self.in_use.add(&uid, allocation);
        self.allocated.push((uid, serde_json::to_value(allocation).expect("it serializes")));
    }

    fn release(&mut self, random: &mut Random) {
        if !self.allocated.is_empty() {
            let place = random.below(self.allocated.len());
            let (uid, _) = self.allocated.swap_remove(place);
            self.in_use.remove(&uid);
        }
    }
}

fn has_admin_access(claim: &Value) -> bool {
    let requests = claim["spec"]["devices"]["requests"].as_array().expect("requests");
    requests.iter().any(|request| request["exactly"]["adminAccess"] == true)
}

/// Leaves out what is random or empty, and writes quantities in one form.
fn comparable(value: &Value) -> Value {
    match value {
        Value::Object(object) => {
            let fields =
                object.iter().filter(|(name, _)| *name != "allocationTimestamp" && *name != "shareID");
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
    let amount = |value: &Value| Value::from(quantity::normalized(value.as_str().expect("a quantity")));
    capacities.map(|(name, value)| (name.clone(), amount(value))).collect()
}

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn allocations_are_those_of_the_scheduler() {
    let what = "allocations, by the scheduler's library";
    let Some(program) = or_skip(what, programs::go("allocator-oracle")) else { return };
    let claims = number("NODEDOCK_ORACLE_CASES", CLAIMS_DEFAULT);
    let first = u64::try_from(number("NODEDOCK_ORACLE_SEED", 1)).expect("64 bits");
    let mut oracle = Oracle::start(&program);
    let mut tally = Tally::default();
    let mut compared = 0;
    for seed in KEPT_SEEDS.iter().copied().chain(first..) {
        if compared >= claims + KEPT_SEEDS.len() * CLAIMS_OF_INVENTORY {
            break;
        }
        let mut random = Random::new(seed);
        let profile = generate::profile(&mut random);
        let mut history = History::new(seed, &mut random, &profile);
        let mut shares = 0;
        for number in 0..CLAIMS_OF_INVENTORY {
            let claim = generate::claim(&mut random, &profile);
            let ours = history.allocate(&claim, &mut shares);
            history.compare(&mut oracle, &claim, &ours, &mut tally);
            if let Ok(allocation) = &ours {
                history.add(format!("claim-{number}"), allocation);
            }
            while random.percent(45) {
                history.release(&mut random);
            }
            compared += 1;
        }
    }
    eprintln!("{compared} claims: {tally:?}");
    assert!(tally.not_compared * 100 <= compared * NOT_COMPARED_PERCENT_MAX, "{compared} claims: {tally:?}");
    if claims >= CLAIMS_DEFAULT {
        let percent = |count: usize| count * 100 / compared;
        assert!(percent(tally.allocated) >= ALLOCATED_PERCENT_MIN, "{compared} claims: {tally:?}");
        assert!(percent(tally.refused) >= REFUSED_PERCENT_MIN, "{compared} claims: {tally:?}");
    }
}
