//! Drivers that mean harm: each with its attack and the host's answer, and after each of them the host is as before.
//!
//! One list has all cases, one function runs them, and `docs/hostile-drivers.md` is generated from the list.

mod craft;
mod files;
mod others;
pub(super) mod table;

use std::os::unix::fs::{PermissionsExt, symlink};

use serde::Deserialize;

use nodedock_core::driver::{Call, ClaimDriver};
use nodedock_model::rule::is_unprintable;
use nodedock_model::{
    AllocatedDevice, DeviceName, DriverClaim, DriverClaimRecord, PoolName, Problem,
};

use super::guest::{Guest, PREPARE_ONE};
use super::*;
use crate::limits::concurrency::CALLS_MAX;

/// The claim that every driver is asked for.
const UID: &str = "u-1";

/// Maximum time of a case.
const CASE_WALL: Duration = Duration::from_secs(120);

/// Stage at which a driver is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Stop {
    Admission,
    Compile,
    Describe,
    Grant,
    Config,
    Discover,
    Health,
    Prepare,
    Unprepare,
    /// Nowhere: the attack has no effect.
    Harmless,
}

impl Stop {
    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// A driver that means no harm, to begin with: no devices, and every claim goes well.
fn small() -> Guest {
    Guest {
        prepare: PREPARE_ONE.into(),
        unprepare: PREPARE_ONE.into(),
        ..Guest::default()
    }
}

/// A driver that means harm.
struct Case {
    name: &'static str,
    attack: &'static str,
    grant: &'static str,
    file: Box<dyn Fn() -> Vec<u8>>,
    stop: Stop,
    code: &'static str,
    /// A part of the message.
    says: &'static str,
}

/// A case without a grant.
fn case(
    name: &'static str,
    attack: &'static str,
    file: impl Fn() -> Vec<u8> + 'static,
    (stop, code, says): (Stop, &'static str, &'static str),
) -> Case {
    Case {
        name,
        attack,
        grant: "",
        file: Box::new(file),
        stop,
        code,
        says,
    }
}

impl Case {
    fn granted(self, grant: &'static str) -> Self {
        Self { grant, ..self }
    }
}

/// All of them.
fn corpus() -> Vec<Case> {
    [files::cases(), table::cases(), others::cases()]
        .into_iter()
        .flatten()
        .collect()
}

/// Stage at which a driver was stopped, with code and message.
#[derive(Debug)]
struct StopReport {
    stop: Stop,
    code: String,
    message: String,
}

impl StopReport {
    fn new(stop: Stop, problem: Problem) -> Self {
        Self {
            stop,
            code: problem.code,
            message: problem.message,
        }
    }

    fn of_file(error: &LoadError) -> Self {
        let stop = match error {
            LoadError::Compile(_) | LoadError::Types(_) => Stop::Compile,
            LoadError::Describe(_) | LoadError::Description(_) => Stop::Describe,
            _ => Stop::Admission,
        };
        Self {
            stop,
            code: error.code().to_string(),
            message: error.to_string(),
        }
    }
}

fn claim() -> DriverClaim {
    let device = AllocatedDevice {
        request: "r".into(),
        driver: DriverName::new(guest::NAME).unwrap(),
        pool: PoolName::new("p").unwrap(),
        device: DeviceName::new("d").unwrap(),
        share_id: None,
        consumed: BTreeMap::new(),
        admin_access: false,
        binding: Default::default(),
    };
    DriverClaim {
        devices: vec![device],
        ..a_claim(UID)
    }
}

/// Takes a driver through its life until it is stopped.
async fn life(driver: &WasmDriver) -> StopReport {
    // A busy machine may need long for what a driver may do at most.
    let call = Call {
        deadline: CASE_WALL,
        ..a_call()
    };
    if !driver.missing_grants().is_empty() {
        let message = driver.missing_grants().join("; ");
        return StopReport {
            stop: Stop::Grant,
            code: "blocked".into(),
            message,
        };
    }
    if let Err(problem) = driver.validate_config(&call).await {
        return StopReport::new(Stop::Config, problem);
    }
    if let Err(problem) = driver.discover(&call, Trigger::Load).await {
        return StopReport::new(Stop::Discover, problem);
    }
    if let Err(problem) = driver.check_health(&call).await {
        return StopReport::new(Stop::Health, problem);
    }
    claims(driver, &call).await
}

async fn claims(driver: &WasmDriver, call: &Call) -> StopReport {
    let mut outcomes = driver.prepare(call, &[claim()]).await;
    assert_eq!(
        outcomes.keys().map(|uid| uid.as_str()).collect::<Vec<_>>(),
        [UID],
        "one outcome per claim"
    );
    let memo = match outcomes.remove(UID).unwrap() {
        Err(problem) => return StopReport::new(Stop::Prepare, problem),
        Ok(prepared) => prepared.memo,
    };
    let live = DriverClaimRecord {
        claim: claim(),
        prepared: true,
        memo,
        driver_version: "1.2.3".into(),
        boot_id: "boot-1".into(),
    };
    match driver.unprepare(call, &[live]).await.remove(UID).unwrap() {
        Err(problem) => StopReport::new(Stop::Unprepare, problem),
        Ok(()) => StopReport {
            stop: Stop::Harmless,
            code: String::new(),
            message: String::new(),
        },
    }
}

/// A node with what a driver may try its paths on.
pub(super) fn node() -> Stage {
    let directory = tempfile::tempdir().unwrap();
    let sys = directory.path().join("sys");
    let card = sys.join("devices/card0");
    std::fs::create_dir_all(&card).unwrap();
    std::fs::create_dir_all(sys.join("class/net/eth0")).unwrap();
    // Few directories, which `**/**` comes to in many ways: what is tested is the bound, not the disk.
    std::fs::create_dir_all(sys.join("deep").join("a/".repeat(8))).unwrap();
    for (name, content) in [
        ("vendor", "0x1af4\n"),
        ("config", "secret"),
        ("remove", ""),
        ("numvfs", "0\n"),
    ] {
        std::fs::write(card.join(name), content).unwrap();
    }
    for (path, content) in [
        ("devices/card0/private", "secret"),
        ("devices/card0/closed/open", "secret"),
        ("devices/card0/uevent", ""),
        ("class/zram-control/hot_add", "1"),
        ("class/zram-control/hot_remove", ""),
        ("module/m/parameters/key", "secret"),
        ("module/m/parameters/path", ""),
        ("bus/pci/drivers_autoprobe", "1"),
        ("kernel/loglevel", "7"),
        ("kernel/boot_params/data", "secret"),
        ("kernel/vmcoreinfo", "secret"),
        ("firmware/memmap/0/start", "secret"),
        ("devices/system/cpu/cpu1/online", "1"),
    ] {
        let path = sys.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    let private = [
        "devices/card0/private",
        "class/zram-control/hot_add",
        "module/m/parameters/key",
    ];
    for (path, mode) in private
        .into_iter()
        .map(|path| (path, 0o400))
        .chain([("devices/card0/closed", 0o700)])
    {
        std::fs::set_permissions(sys.join(path), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    std::fs::write(card.join("binary"), [0xff, 0xfe]).unwrap();
    std::fs::File::create(card.join("endless"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    std::fs::write(directory.path().join("outside"), "secret").unwrap();
    for (link, target) in [
        ("up", "../outside"),
        ("root", "/"),
        ("descriptors", "/proc/self/fd"),
        ("loop", "loop"),
    ] {
        symlink(target, sys.join(link)).unwrap();
    }
    let function = sys.join("devices/pci0000:00/0000:00:04.0");
    std::fs::create_dir_all(&function).unwrap();
    std::fs::create_dir_all(sys.join("bus/pci/devices")).unwrap();
    std::fs::create_dir_all(sys.join("bus/pci/drivers/vfio-pci")).unwrap();
    std::fs::write(function.join("class"), "0x030000\n").unwrap();
    let functions = sys.join("bus/pci/devices");
    symlink(
        "../../../devices/pci0000:00/0000:00:04.0",
        functions.join("0000:00:04.0"),
    )
    .unwrap();
    symlink("../../../devices/card0", functions.join("0000:00:05.0")).unwrap();
    let share = directory.path().join("usr/share");
    std::fs::create_dir_all(&share).unwrap();
    std::fs::write(share.join("version"), "1").unwrap();
    let vendor = directory.path().join("opt/vendor");
    std::fs::create_dir_all(&vendor).unwrap();
    std::fs::create_dir(vendor.join("closed")).unwrap();
    for file in [
        "private",
        "api-token",
        "closed/open",
        "APIKEY.TXT",
        "id_rsa",
        ".netrc",
        "foreign",
    ] {
        std::fs::write(vendor.join(file), "secret").unwrap();
    }
    std::fs::set_permissions(
        vendor.join("closed"),
        std::fs::Permissions::from_mode(0o700),
    )
    .unwrap();
    // Where this is not root, who owns the file is the one who runs the test: then it is private.
    if std::os::unix::fs::chown(vendor.join("foreign"), Some(1234), None).is_err() {
        std::fs::set_permissions(
            vendor.join("foreign"),
            std::fs::Permissions::from_mode(0o600),
        )
        .unwrap();
    }
    for path in [
        "etc/vendor/conf.d",
        "etc/ceph",
        "run/vendor/sockets",
        "usr/bin",
        "usr/lib/systemd/system",
        "home/a",
        "opt/open/lib",
        "opt/hooks",
        "opt/dock/var/lib/nodedock/drivers",
    ] {
        std::fs::create_dir_all(directory.path().join(path)).unwrap();
    }
    for file in ["etc/vendor/conf", "etc/ceph/ceph.conf", "opt/hooks/open"] {
        std::fs::write(directory.path().join(file), "secret").unwrap();
    }
    std::fs::set_permissions(
        directory.path().join("opt/hooks/open"),
        std::fs::Permissions::from_mode(0o755),
    )
    .unwrap();
    for open in ["opt/open", "opt/hooks"] {
        std::fs::set_permissions(
            directory.path().join(open),
            std::fs::Permissions::from_mode(0o777),
        )
        .unwrap();
    }
    for (link, target) in [
        ("etc", "/etc/ssh"),
        ("hook", "/opt/hooks/open"),
        ("conf", "/etc/vendor/conf"),
    ] {
        symlink(target, vendor.join(link)).unwrap();
    }
    std::fs::create_dir_all(directory.path().join("etc/ssh")).unwrap();
    std::fs::set_permissions(
        vendor.join("private"),
        std::fs::Permissions::from_mode(0o600),
    )
    .unwrap();
    std::fs::File::create(vendor.join("endless"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    std::fs::create_dir_all(directory.path().join("etc")).unwrap();
    std::fs::write(directory.path().join("etc/shadow"), "secret").unwrap();
    symlink("/etc/shadow", vendor.join("shadow")).unwrap();
    symlink("/proc/self/fd/0", vendor.join("descriptor")).unwrap();
    std::fs::create_dir_all(directory.path().join("proc/self/fd")).unwrap();
    std::fs::write(directory.path().join("proc/self/fd/0"), "secret").unwrap();
    let fifo = rustix::fs::FileType::Fifo;
    let dev = directory.path().join("dev");
    std::fs::create_dir_all(&dev).unwrap();
    for path in [
        sys.join("fifo"),
        dev.join("pipe"),
        dev.join("card9"),
        dev.join("mem"),
        vendor.join("pipe"),
    ] {
        rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, 0o600.into(), 0).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    }
    symlink("pipe", dev.join("link")).unwrap();
    symlink("/proc/self/fd", dev.join("fd")).unwrap();
    Stage::on(directory, false)
}

async fn verdict(stage: Arc<Stage>, bytes: Bytes, grant: &'static str) -> StopReport {
    match stage.try_load(bytes, grant).await {
        Ok(driver) => {
            let verdict = life(&driver).await;
            assert!(calls(&driver) >= 1, "its state can be read");
            verdict
        }
        Err(error) => StopReport::of_file(&error),
    }
}

/// Plays a case; the error describes a wrong answer of the host, or damage to the host afterwards.
async fn play(stage: &Arc<Stage>, good: &WasmDriver, case: &Case) -> Result<(), String> {
    let bytes = Bytes::from((case.file)());
    let playing = tokio::spawn(verdict(Arc::clone(stage), bytes.clone(), case.grant));
    let meanwhile = good.prepare(&a_call(), &[claim()]).await;
    let verdict = match tokio::time::timeout(CASE_WALL, playing).await {
        Ok(Ok(verdict)) => verdict,
        Ok(Err(panic)) => return Err(format!("the host panics: {panic}")),
        Err(_) => return Err(format!("the host is busy with it for {CASE_WALL:?}")),
    };
    let as_wanted = verdict.stop == case.stop
        && verdict.code == case.code
        && verdict.message.contains(case.says);
    if !as_wanted {
        return Err(format!(
            "{:?} {} {:?} is wanted, not {verdict:?}",
            case.stop, case.code, case.says
        ));
    }
    if verdict.message.len() > 2048 || verdict.message.contains(is_unprintable) {
        return Err(format!("no short line: {:?}", verdict.message));
    }
    if meanwhile[UID] != Ok(Default::default()) {
        return Err(format!(
            "a good driver does not work meanwhile: {meanwhile:?}"
        ));
    }
    if case.stop == Stop::Admission && bytes.len() < 1 << 20 {
        let file = DriverFile {
            name: case.name.into(),
            bytes,
        };
        let seen = stage.host.inspect(file, &Grant::empty()).await;
        let code = seen.driver.err().map(|error| error.code().as_str());
        if code != Some(case.code) {
            return Err(format!("inspection says {code:?}"));
        }
    }
    unharmed(stage, good).await
}

/// Nothing is left of any call, and a good driver works.
async fn unharmed(stage: &Stage, good: &WasmDriver) -> Result<(), String> {
    let outcomes = good.prepare(&a_call(), &[claim()]).await;
    if outcomes[UID] != Ok(Default::default()) {
        return Err(format!(
            "a good driver does not work afterwards: {outcomes:?}"
        ));
    }
    if stage.host.permits.all.memories.available_permits() != CALLS_MAX {
        return Err("a call keeps its permits".into());
    }
    let Some(pool) = stage.host.runtime.engine.pooling_allocator_metrics() else {
        return Ok(());
    };
    let left = (
        pool.component_instances(),
        pool.core_instances(),
        pool.memories(),
        pool.tables(),
        pool.stacks(),
    );
    if left == (0, 0, 0, 0, 0) {
        Ok(())
    } else {
        Err(format!("left of its calls: {left:?}"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_drivers_leave_host_unharmed() {
    let stage = Arc::new(node());
    let good = stage.load(&small()).await;
    let mut wrong = Vec::new();
    for case in &corpus() {
        if let Err(why) = play(&stage, &good, case).await {
            wrong.push(format!("{}: {why}", case.name));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} cases:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn names_are_unique() {
    let mut names: Vec<_> = corpus().iter().map(|case| case.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

/// The page for people, made of the list.
fn page() -> String {
    let mut text = "# Hostile drivers\n\n\
        Drivers that mean harm, and how each is stopped. The table is generated from the cases in `host/wasm/src/tests/hostile`, whose test \
        takes\neach of them through the life of a driver and checks afterwards that the host is as before: a good driver answers, and \
        nothing is left\nof any call. `NODEDOCK_WRITE_DOCS=1 cargo test -p nodedock-wasm --lib hostile` writes it again.\n\n\
        | name | what it tries | stopped at | code | says |\n| --- | --- | --- | --- | --- |\n"
        .to_owned();
    for case in corpus() {
        let stage = case.stop.name();
        let code = if case.code.is_empty() {
            String::new()
        } else {
            format!("`{}`", case.code)
        };
        let says = case.says.replace('|', "\\|");
        text += &format!(
            "| {} | {} | {stage} | {code} | {says} |\n",
            case.name, case.attack
        );
    }
    text
}

#[test]
fn hostile_driver_page_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/hostile-drivers.md");
    if std::env::var_os("NODEDOCK_WRITE_DOCS").is_some() {
        std::fs::write(path, page()).unwrap();
    }
    assert!(
        std::fs::read_to_string(path).unwrap() == page(),
        "docs/hostile-drivers.md is not up to date"
    );
}
