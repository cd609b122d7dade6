//! Read one table's CDC log by `scylla_cdc::log_reader`, and print a line of JSON for each pass:
//! `scylla-cdc-peer ADDRESS KEYSPACE TABLE START_MS END_MS PASSES THREADS`.
//!
//! The consumer looks at each row's operation, at its keys, at each value and at each mark of a deleted value, and
//! keeps only counts. The table has the columns pk int, ck int, a int, b text, c bigint.
//!
//! The settings are the best for old data. The whole time is one window: each reader (the crate has one for each token
//! range) sends one statement and asks for its pages, so it never sleeps between windows. The safety interval is 0. The
//! sleep interval stays at the crate's 10 s, since it is also how often the crate asks for the next generation.
//! Checkpoints are not saved. The page size is the crate's own, 5000.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use scylla::client::PoolSize;
use scylla::client::execution_profile::ExecutionProfile;
use scylla::client::session::Session;
use scylla::client::session_builder::SessionBuilder;
use scylla::statement::Consistency;
use scylla_cdc::consumer::{CDCRow, Consumer, ConsumerFactory, OperationType};
use scylla_cdc::log_reader::CDCLogReaderBuilder;

const CONNECTIONS: usize = 2;
const REQUEST_SECONDS: u64 = 600;
/// Linux counts the times of /proc/PID/stat in hundredths of a second (USER_HZ), whatever the kernel's own clock.
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Default)]
struct Counts {
    rows: u64,
    deletions: u64,
    values: u64,
    text_bytes: u64,
    deleted_values: u64,
    sum_keys: i64,
    sum_a: i64,
    sum_c: i64,
}

struct Counter {
    own: Counts,
    total: Arc<Mutex<Counts>>,
}

#[async_trait]
impl Consumer for Counter {
    async fn consume_cdc(&mut self, row: CDCRow<'_>) -> anyhow::Result<()> {
        let own = &mut self.own;
        own.rows += 1;
        if matches!(row.operation, OperationType::RowDelete | OperationType::PartitionDelete) {
            own.deletions += 1;
        }
        for key in ["pk", "ck"] {
            if let Some(value) = row.get_value(key).as_ref().and_then(|value| value.as_int()) {
                own.sum_keys += i64::from(value);
            }
        }
        if let Some(value) = row.get_value("a").as_ref().and_then(|value| value.as_int()) {
            own.values += 1;
            own.sum_a += i64::from(value);
        }
        if let Some(value) = row.get_value("b").as_ref().and_then(|value| value.as_text()) {
            own.values += 1;
            own.text_bytes += value.len() as u64;
        }
        if let Some(value) = row.get_value("c").as_ref().and_then(|value| value.as_bigint()) {
            own.values += 1;
            own.sum_c += value;
        }
        for name in ["a", "b", "c"] {
            own.deleted_values += u64::from(row.is_value_deleted(name));
        }
        Ok(())
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        let (own, mut total) = (&self.own, self.total.lock().unwrap());
        total.rows += own.rows;
        total.deletions += own.deletions;
        total.values += own.values;
        total.text_bytes += own.text_bytes;
        total.deleted_values += own.deleted_values;
        total.sum_keys += own.sum_keys;
        total.sum_a += own.sum_a;
        total.sum_c += own.sum_c;
    }
}

struct Counters {
    total: Arc<Mutex<Counts>>,
}

#[async_trait]
impl ConsumerFactory for Counters {
    async fn new_consumer(&self) -> Box<dyn Consumer> {
        Box::new(Counter { own: Counts::default(), total: Arc::clone(&self.total) })
    }
}

struct Order {
    address: String,
    keyspace: String,
    table: String,
    start: Duration,
    end: Duration,
    passes: usize,
    threads: usize,
}

impl Order {
    fn of(arguments: &[String]) -> anyhow::Result<Order> {
        let [address, keyspace, table, start, end, passes, threads] = arguments else {
            anyhow::bail!("ADDRESS KEYSPACE TABLE START_MS END_MS PASSES THREADS are needed");
        };
        Ok(Order {
            address: address.clone(),
            keyspace: keyspace.clone(),
            table: table.clone(),
            start: Duration::from_millis(start.parse()?),
            end: Duration::from_millis(end.parse()?),
            passes: passes.parse()?,
            threads: threads.parse()?,
        })
    }
}

fn main() -> anyhow::Result<()> {
    let order = Order::of(&std::env::args().skip(1).collect::<Vec<_>>())?;
    let runtime = match order.threads {
        1 => tokio::runtime::Builder::new_current_thread().enable_all().build()?,
        threads => tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?,
    };
    runtime.block_on(run(&order))
}

async fn run(order: &Order) -> anyhow::Result<()> {
    let profile = ExecutionProfile::builder()
        .consistency(Consistency::LocalOne)
        .request_timeout(Some(Duration::from_secs(REQUEST_SECONDS)))
        .build();
    let session = SessionBuilder::new()
        .known_node(&order.address)
        .default_execution_profile_handle(profile.into_handle())
        .pool_size(PoolSize::PerHost(NonZeroUsize::new(CONNECTIONS).unwrap()))
        .build()
        .await?;
    let session = Arc::new(session);
    for _ in 0..order.passes {
        let (began, cpu) = (Instant::now(), cpu_seconds()?);
        let counts = pass(order, &session).await?;
        let line = serde_json::json!({
            "seconds": began.elapsed().as_secs_f64(), "cpu_seconds": cpu_seconds()? - cpu,
            "rows": counts.rows, "deletions": counts.deletions, "values": counts.values,
            "text_bytes": counts.text_bytes, "deleted_values": counts.deleted_values,
            "sum_keys": counts.sum_keys, "sum_a": counts.sum_a, "sum_c": counts.sum_c,
        });
        println!("{line}");
    }
    Ok(())
}

async fn pass(order: &Order, session: &Arc<Session>) -> anyhow::Result<Counts> {
    let total = Arc::new(Mutex::new(Counts::default()));
    let (_reader, finished) = CDCLogReaderBuilder::new()
        .session(Arc::clone(session))
        .keyspace(&order.keyspace)
        .table_name(&order.table)
        .start_timestamp(order.start)
        .end_timestamp(order.end)
        .window_size(order.end - order.start)
        .safety_interval(Duration::ZERO)
        .consumer_factory(Arc::new(Counters { total: Arc::clone(&total) }))
        .build()
        .await?;
    finished.await?;
    Ok(std::mem::take(&mut *total.lock().unwrap()))
}

/// Return the user and system time of this process so far, all threads together.
fn cpu_seconds() -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // man proc: pid (name) state …; the times are the fields 14 and 15, counting from 1
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    anyhow::ensure!(fields.len() > 12, "/proc/self/stat has no times: {stat}");
    Ok((fields[11].parse::<f64>()? + fields[12].parse::<f64>()?) / TICKS_PER_SECOND)
}
