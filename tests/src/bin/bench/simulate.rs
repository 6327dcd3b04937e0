//! Virtual nodes: how long their publication takes, and what they cost then.

use std::process::Stdio;
use std::time::{Duration, Instant};

use nodedock_stand_ins::api_server::ApiServer;
use nodedock_tests::Root;
use nodedock_tests::daemon::memory_mib;
use nodedock_tests::drivers::{Form, side_file, wasm};
use nodedock_tests::recorded::Recorded;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::Size;
use crate::table::Table;

const DEVICES: usize = 8;
const RATE: usize = 500;
/// Time over which the CPU time of an idle simulation is measured.
const IDLE: Duration = Duration::from_secs(10);
/// Clock ticks of a second in `/proc/PID/stat` (`USER_HZ`).
const TICKS: f64 = 100.0;

pub(crate) async fn run(size: Size, table: &mut Table) {
    let (root, api, nodes) = (Root::new(), ApiServer::start().await, size.virtual_nodes);
    let machines = ["one", "two"].map(|name| {
        let machine = Recorded::new(&root.path().join(name), &["amdgpu"]);
        for index in 0..DEVICES {
            machine.function(
                &format!("0000:{:02x}:00.0", index + 1),
                "0x030000",
                "amdgpu",
                None,
            );
        }
        machine
    });
    root.drop_in("pci.grant.yaml", side_file("pci", "grant"));
    root.drop_in("pci.wasm", wasm("pci", Form::Core));
    let mut command = root.command();
    command.args([
        "simulate",
        "--nodes",
        &nodes.to_string(),
        "--requests-per-second",
        &RATE.to_string(),
    ]);
    for machine in &machines {
        command.arg("--hardware").arg(machine.path());
    }
    command
        .arg("--drivers")
        .arg(root.drivers())
        .arg("--kubeconfig")
        .arg(api.kubeconfig(root.path()));
    let started = Instant::now();
    let mut simulation = command
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut lines = BufReader::new(simulation.stdout.take().expect("it is piped")).lines();
    while let Some(line) = lines.next_line().await.expect("the program writes text") {
        if line.starts_with("all published") {
            break;
        }
    }
    let (took, requests) = (started.elapsed(), api.requests().len());
    let slices = api.look(|state| state.objects("resourceslices").len());
    let note = format!(
        "{nodes} nodes with {DEVICES} devices: {requests} requests at {RATE}/s, {slices} slices"
    );
    let published = format!("simulate: {nodes} nodes published");
    table.figures(&published, vec![took.as_secs_f64()], "s", "", &note);
    let each = requests as f64 / nodes as f64;
    table.figures(
        "simulate: requests until published",
        vec![each],
        "of a node",
        "",
        "",
    );
    let pid = simulation.id().expect("it runs");
    table.figures(
        "simulate: resident",
        vec![memory_mib(pid, "VmRSS")],
        "MiB",
        "",
        "",
    );
    let (before, requests) = (cpu_seconds(pid), api.requests().len());
    tokio::time::sleep(IDLE).await;
    let idle = (api.requests().len() - requests) as f64 / IDLE.as_secs_f64();
    let share = 100.0 * (cpu_seconds(pid) - before) / IDLE.as_secs_f64();
    table.figures(
        "simulate: CPU while idle",
        vec![share],
        "%",
        "",
        &format!("of one core, over {IDLE:?}"),
    );
    table.figures(
        "simulate: requests while idle",
        vec![idle],
        "/s",
        "",
        "of all nodes together",
    );
    simulation.kill().await.expect("it ran");
}

/// User and system time of a process.
fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields = stat
        .rsplit(") ")
        .next()
        .expect("the name is in parentheses");
    // Fields 14 and 15 of proc(5); the first after the name is 3.
    let ticks = fields
        .split(' ')
        .skip(11)
        .take(2)
        .map(|field| field.parse::<f64>().expect("a number"));
    ticks.sum::<f64>() / TICKS
}
