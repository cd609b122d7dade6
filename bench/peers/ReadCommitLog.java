import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Iterator;
import java.util.List;
import org.apache.cassandra.config.DatabaseDescriptor;
import org.apache.cassandra.cql3.statements.schema.CreateTableStatement;
import org.apache.cassandra.db.Mutation;
import org.apache.cassandra.db.RangeTombstone;
import org.apache.cassandra.db.commitlog.CommitLogDescriptor;
import org.apache.cassandra.db.commitlog.CommitLogReadHandler;
import org.apache.cassandra.db.commitlog.CommitLogReader;
import org.apache.cassandra.db.partitions.PartitionUpdate;
import org.apache.cassandra.db.rows.Cell;
import org.apache.cassandra.db.rows.Row;
import org.apache.cassandra.io.util.File;
import org.apache.cassandra.schema.KeyspaceMetadata;
import org.apache.cassandra.schema.KeyspaceParams;
import org.apache.cassandra.schema.Schema;
import org.apache.cassandra.schema.SchemaTransformations;
import org.apache.cassandra.schema.TableMetadata;
import org.apache.cassandra.schema.Tables;

/**
 * Reads commit logs by Cassandra's own reader, in some passes over the same segments; visits every cell, keeps nothing:
 * {@code java … ReadCommitLog KEYSPACE STATEMENTS_FILE PASSES SEGMENT…}. The file has a CREATE TABLE a line, with ids.
 * Prints a line of JSON for each pass, as bench/peers/one_core.py reads them. CPU time is that of the process, with its
 * compilers and collectors.
 */
class ReadCommitLog implements CommitLogReadHandler {
    long mutations, rows, cells, bytes;

    @Override
    public boolean shouldSkipSegmentOnError(CommitLogReadException error) throws CommitLogReadException {
        throw error;
    }

    @Override
    public void handleUnrecoverableError(CommitLogReadException error) throws CommitLogReadException {
        throw error;
    }

    @Override
    public void handleMutation(Mutation mutation, int size, int position, CommitLogDescriptor descriptor) {
        mutations++;
        for (PartitionUpdate update : mutation.getPartitionUpdates()) {
            if (!update.partitionLevelDeletion().isLive()) rows++;
            if (!update.staticRow().isEmpty()) visit(update.staticRow());
            for (Row row : update) visit(row);
            for (Iterator<RangeTombstone> all = update.deletionInfo().rangeIterator(false); all.hasNext(); all.next()) {
                rows++;
            }
        }
    }

    void visit(Row row) {
        rows++;
        for (Cell<?> cell : row.cells()) {
            cells++;
            bytes += cell.valueSize();
        }
    }

    public static void main(String[] arguments) throws Exception {
        DatabaseDescriptor.toolInitialization();
        TableMetadata[] tables = Files.readAllLines(Path.of(arguments[1])).stream()
                .map(statement -> CreateTableStatement.parse(statement, arguments[0]).build())
                .toArray(TableMetadata[]::new);
        KeyspaceMetadata keyspace = KeyspaceMetadata.create(arguments[0], KeyspaceParams.simple(1), Tables.of(tables));
        Schema.instance.transform(SchemaTransformations.addKeyspace(keyspace, true));
        List<String> segments = Arrays.asList(arguments).subList(3, arguments.length);
        OperatingSystemMXBean system = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        for (int pass = 0; pass < Integer.parseInt(arguments[2]); pass++) {
            ReadCommitLog counts = new ReadCommitLog();
            long began = System.nanoTime(), cpu = system.getProcessCpuTime();
            for (String segment : segments) new CommitLogReader().readCommitLogSegment(counts, new File(segment), false);
            double seconds = (System.nanoTime() - began) / 1e9, used = (system.getProcessCpuTime() - cpu) / 1e9;
            System.out.printf(
                    "{\"seconds\": %.6f, \"cpu_seconds\": %.6f, \"mutations\": %d, \"rows\": %d, \"cells\": %d}%n",
                    seconds, used, counts.mutations, counts.rows, counts.cells);
        }
        System.exit(0);
    }
}
