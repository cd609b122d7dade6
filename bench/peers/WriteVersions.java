import com.datastax.driver.core.BoundStatement;
import com.datastax.driver.core.Cluster;
import com.datastax.driver.core.PreparedStatement;
import com.datastax.driver.core.ResultSetFuture;
import com.datastax.driver.core.Session;
import java.net.InetSocketAddress;
import java.util.Date;
import java.util.UUID;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicReference;

/**
 * Writes the rows of one SSTable of bench/sstable.py, as a client of a node:
 * {@code java … WriteVersions.java ADDRESS PORT KEYSPACE VERSION ROWS}.
 *
 * <p>Half of the rows are those of every version, so that each of them is in all SSTables; the others are its own. Of
 * 100 rows that an earlier version may have written, 3 are updates of two cells, 2 deletions of a cell, 1 a deletion of
 * the row.
 */
class WriteVersions {
    static final int IN_FLIGHT = 1024;
    static final int PARTITION_ROWS = 5;

    public static void main(String[] arguments) throws Exception {
        long version = Long.parseLong(arguments[3]), rows = Long.parseLong(arguments[4]), shared = rows / 2;
        InetSocketAddress node = new InetSocketAddress(arguments[0], Integer.parseInt(arguments[1]));
        try (Cluster cluster = Cluster.builder().addContactPointsWithPorts(node).withoutMetrics().withoutJMXReporting().build();
                Session session = cluster.connect(arguments[2])) {
            PreparedStatement insert = session.prepare(
                    "INSERT INTO ev (id, seq, n, amount, name, ts, score, ref) VALUES (?, ?, ?, ?, ?, ?, ?, ?)");
            PreparedStatement update = session.prepare("UPDATE ev SET n = ?, amount = ? WHERE id = ? AND seq = ?");
            PreparedStatement deleteCell = session.prepare("DELETE name FROM ev WHERE id = ? AND seq = ?");
            PreparedStatement deleteRow = session.prepare("DELETE FROM ev WHERE id = ? AND seq = ?");
            Semaphore free = new Semaphore(IN_FLIGHT);
            AtomicReference<Throwable> failure = new AtomicReference<>();
            for (long number = 0; number < rows && failure.get() == null; number++) {
                long row = number < shared ? number : number + version * (rows - shared);
                String id = "customer-" + row / PARTITION_ROWS;
                int seq = (int) (row % PARTITION_ROWS);
                int kind = number < shared && version > 0 ? (int) ((row * 31 + version * 17) % 100) : 100;
                BoundStatement statement;
                if (kind < 3) statement = update.bind((int) row, row * 3, id, seq);
                else if (kind < 5) statement = deleteCell.bind(id, seq);
                else if (kind < 6) statement = deleteRow.bind(id, seq);
                else statement = insert.bind(
                        id,
                        seq,
                        (int) ((row + version) * 7 % Integer.MAX_VALUE),
                        row * 1_000_003 + version,
                        "name number " + (row + version) % 1000,
                        new Date(1_700_000_000_000L + row),
                        row / 3.0,
                        new UUID(row * 0x9E3779B97F4A7C15L, row * 0xC2B2AE3D27D4EB4FL));
                free.acquire();
                ResultSetFuture future = session.executeAsync(statement);
                future.addListener(() -> {
                    try {
                        future.getUninterruptibly();
                    } catch (Throwable error) {
                        failure.compareAndSet(null, error);
                    }
                    free.release();
                }, Runnable::run);
            }
            free.acquire(IN_FLIGHT);
            if (failure.get() != null) throw new Exception(failure.get());
        }
        System.exit(0);
    }
}
