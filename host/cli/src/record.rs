//! `nodedock record`: writes the recorded calls of a driver to a file.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use nodedock_proto::node::v1;

use super::Location;
use super::client::connect;
use super::completion::Named;
use super::output::print_text;
use nodedock_core::recording::file::{self, FORMAT, Header, RECORDING_BYTES_MAX};
use nodedock_core::recording::redact::redact;
use nodedockd::recording::SECONDS_MAX;

#[derive(Args)]
pub(super) struct RecordArgs {
    /// Name of the driver, or of the extended resource of a device plugin
    #[arg(add = Named::Drivers.candidates())]
    driver: String,
    /// File to write; `-` is standard output
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Record for this many seconds first, regardless of the config [default: write what is recorded]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(SECONDS_MAX)))]
    seconds: Option<u32>,
    /// Leave out the values of fields that may have secrets, such as environments, opaque parameters, annotations and contents of files
    #[arg(long)]
    redact: bool,
}

pub(super) async fn run(location: &Location, args: RecordArgs) -> Result<()> {
    let RecordArgs {
        driver,
        out,
        seconds,
        redact: is_redacted,
    } = args;
    let request = v1::RecordDriverRequest {
        name: driver.clone(),
        seconds: seconds.unwrap_or_default(),
    };
    let mut stream = connect(location)
        .await?
        .record_driver(request)
        .await?
        .into_inner();
    let mut text = Vec::new();
    while let Some(mut part) = stream.message().await? {
        text.append(&mut part.lines);
        ensure!(
            text.len() as u64 <= RECORDING_BYTES_MAX,
            "the recording is larger than {RECORDING_BYTES_MAX} bytes"
        );
    }
    let header = Header {
        format: FORMAT.to_owned(),
        driver,
        nodedock: env!("CARGO_PKG_VERSION").to_owned(),
        is_redacted,
    };
    let lines = || {
        text.split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
    };
    let has = |kind: &str| {
        lines()
            .filter(|line| line.starts_with(format!("{{\"{kind}\":").as_bytes()))
            .count()
    };
    let (calls, files) = (has("call"), has("file"));
    ensure!(
        calls > 0,
        "no call of {driver} is recorded, so nothing is written: record it for longer with --seconds, or have the daemon call it meanwhile \
         with `nodedock driver reload {driver}`",
        driver = header.driver
    );
    let mut content = Vec::new();
    if is_redacted {
        let lines = redact(&lines().collect::<Vec<_>>()).context("leave out secrets")?;
        file::write(&header, lines.iter().map(Vec::as_slice), &mut content)
    } else {
        file::write(&header, lines(), &mut content)
    }
    .context("write the recording")?;
    if out == Path::new("-") {
        return std::io::stdout()
            .lock()
            .write_all(&content)
            .context("write to standard output");
    }
    // With mode 0600.
    nodedock_base::file::replace(&out, &content)
        .with_context(|| format!("write {}", out.display()))?;
    let secrets = match is_redacted {
        true => "redacted",
        false => "not redacted: it may have secrets",
    };
    print_text(&format!(
        "{}: {calls} calls, {files} driver files, {secrets}",
        out.display()
    ))
}
